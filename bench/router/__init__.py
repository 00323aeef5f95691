"""A network whose links have delays and rates of their own: namespaces, and a router of ours.

    namespace h0  [eth0, TUN] --- file descriptor ---\\
    namespace h1  [eth0, TUN] --- file descriptor ----> forwarder (one process)
    namespace h2  [eth0, TUN] --- file descriptor ---/

Idea. A kernel without netem cannot delay packets, but a process can. Each host is a network
namespace whose only interface is a TUN device: what the host sends is read from a file descriptor,
and what is written there arrives at the host. One process holds all these descriptors. It reads a
packet, works out when the packet would be through uplink and link (queues.py), keeps it until then,
and writes it to the destination's descriptor.

Rules:
- Rate and delay are kept by *virtual times*, not by tokens or sleeps: a line knows when it will
  have sent all that it has taken, and each packet's arrival follows from that when it comes in. So
  a forwarder that is late with one packet is not slower with the next ones.
- Every queue is bounded in time: a packet that would wait longer than QUEUE_S for a line is
  dropped, and TCP slows down. That is what a home router of 2026 does, not a perfect one.
- The devices offload segmentation (IFF_VNET_HDR, TUN_F_TSO): TCP's segments come as one packet of
  up to 64 KiB with a header that says how it would be cut, and are handed on uncut. That is what
  makes a forwarder in Python fast enough. The lines count the bytes of all the segments with their
  headers; how large a bunch is, TCP itself bounds to a millisecond of its rate, or two segments.
- The forwarder ends with its parent, and the devices with it; namespaces.py removes the rest.

What it does not show: loss other than that of full queues, reordering, delays that vary, limits on
what a host receives, address translation. A bunch arrives whole, with its last segment, and is
dropped whole. Packets are as late as the machine is busy; `statistics` tells how late.

    link_table.py   delays and rates          tun.py         the devices
    queues.py       when a packet arrives     forwarder.py   the process
    packets.py      what a packet is          network.py     hosts and forwarder put together
"""
