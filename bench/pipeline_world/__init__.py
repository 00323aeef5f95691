"""A pipeline of real daemons on nine machines of known links, whose compute is stated.

Idea. What a pipeline over the internet takes is decided by compute, links, and what waits for what.
Links are real here: each machine is a network namespace behind the router (bench/router), with the
latency between its region and the others', and a part of the bandwidth. Daemons are real: theirs
are streams, credits, slots, shared memory, codecs and iterations. Compute is *stated*: the trainer
sleeps for as long as it is told that a forward, a backward or the loss takes, in place of the
layers, and passes its boundary on unchanged. So two cores carry nine machines, and the simulator
(protocol/pipeline/simulator.py) can be asked beforehand what each iteration takes.

Rules:
- Bandwidths and boundaries are smaller than those of a large model by the same factor, so transfers
  take as long as with it; latencies are whole.
- Every way of choosing paths is given the same machines, microbatches and links, and runs the same
  daemons. A machine that a way does not use is not started.
- An iteration ends when the last data peer has its last gradient. Times are the trainers' own, of
  one clock, for all run on one machine.

    world.py     machines, links, and the problem that they are
    ways.py      full pipelines, SkipPipe and ours, as plans
    trainer.py   the trainer with stated compute     given_paths.py   the planner that has a way's
    daemon.py    the daemon that has both            swarm.py         daemons on their machines
    timeline.py  what they did, and when
"""
