"""The tables of machines and links: what is read, and what each wrong line says."""

import pytest

from protocol.pipeline.problem import MAX_PEERS
from protocol.pipeline.tables import (
    CARDS,
    HOW,
    SAME_PLACE,
    BadTable,
    MachineOffer,
    card_named,
    line_between,
    link_matrices,
    parse_links,
    parse_peers,
)

HEAD = "peer,location,compute_s,slots,price_per_hour\n"
PEERS = HEAD + "a,Iowa,0.5,3,0.4\nb,LA,0.25,2,1\n"
LINKS = "a,b,latency_ms,bandwidth_mbps\n"


def test_machines_are_read():
    table = (
        "# offers\nslots, peer ,location,price_per_hour,compute_s,memory_gb\n\n3,a,Iowa,0.4,0.5,\n"
    )
    table += "2,b,LA,1,0.25,24\n"
    assert parse_peers(table) == (
        MachineOffer("a", "Iowa", 500_000, 3, 0.4),
        MachineOffer("b", "LA", 250_000, 2, 1.0, 24 * 10**9),
    )


def test_links_go_one_way_and_the_rest_by_location():
    offers = parse_peers(PEERS + "c,LA,1,1,1\n")
    links = parse_links(LINKS + "a,b,7.5,80\n", offers)
    latencies, rates = link_matrices(offers, links)
    table = line_between("Iowa", "LA")
    assert latencies[0][1] == 7500
    assert rates[0][1] == 10_000_000
    assert (latencies[1][0], rates[1][0]) == table
    assert (latencies[1][2], rates[1][2]) == SAME_PLACE


def test_an_unknown_place_takes_the_link_of_the_other_way():
    offers = parse_peers(HEAD + "a,barn,1,1,1\nb,shed,1,1,1\n")
    latencies, _ = link_matrices(offers, parse_links(LINKS + "b,a,3,10\n", offers))
    assert latencies[0][1] == latencies[1][0] == 3000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "peers: empty; the first line is peer,location"),
        (HEAD, "peers: no machine in it, only the names of columns"),
        ("peer,location\n", "peers line 1: no column price_per_hour, no column compute_s or card"),
        (HEAD.replace(",", ";"), "peers line 1: columns are separated by commas: peer,location"),
        (HEAD.replace("slots", "slots,vram"), "unknown column 'vram'"),
        (HEAD.replace("slots", "slots,slots"), "a column twice"),
        (PEERS + "c,LA,1,1\n", "peers line 4: 4 values, the first line names 5 columns"),
        (PEERS + "\n# x\na,LA,1,1,1\n", "peers line 6: a second machine with the name 'a'"),
        (PEERS + ",LA,1,1,1\n", "peers line 4: the machine has no name"),
        (PEERS + "c,LA,fast,1,1\n", "peers line 4: compute_s is 'fast', not a number"),
        (PEERS + "c,LA,0,1,1\n", "peers line 4: compute_s is 0; it must be 1e-05"),
        (PEERS + "c,LA,nan,1,1\n", "compute_s is nan"),
        (PEERS + "c,LA,1,1.5,1\n", "peers line 4: slots is 1.5, not a whole number"),
        (PEERS + "c,LA,1,0,1\n", "slots is 0; it must be 1 to"),
        (
            HEAD.replace("slots", "gpus") + "c,LA,1,0,1\n",
            "peers line 2: gpus is 0; it must be 1 to",
        ),
        (HEAD.replace("slots", "gpu_link") + "c,LA,1,ib,1\n", "gpu_link is 'ib'; use pcie or nvl"),
        (PEERS + "c,LA,1,-2,1\n", "peers line 4: slots is -2; it must be 1 to"),
        (PEERS + "c,LA,inf,1,1\n", "peers line 4: compute_s is inf; it must be"),
        (PEERS + 'c,"LA,1,1,1\n', "peers line 4: unexpected end of data"),
        ("\ufeff", "peers: empty; the first line is peer,location"),
        (PEERS + "c,LA,1,1,-1\n", "price_per_hour is -1"),
        (HEAD + "".join(f"p{i},LA,1,1,1\n" for i in range(MAX_PEERS + 1)), "at most 1024 can be"),
    ],
)
def test_a_wrong_line_of_machines_is_named(text, sentence):
    with pytest.raises(BadTable) as caught:
        parse_peers(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a,x,1,1", "links line 2: no machine is called 'x'"),
        ("a,a,1,1", "links line 2: a link from 'a' to itself"),
        ("a,b,1,1\na,b,2,2", "links line 3: a second link from 'a' to 'b'"),
        ("a,b,-1,1", "latency_ms is -1"),
        ("a,b,1,0", "bandwidth_mbps is 0; it must be 0.001"),
    ],
)
def test_a_wrong_line_of_links_is_named(line, sentence):
    with pytest.raises(BadTable) as caught:
        parse_links(LINKS + line, parse_peers(PEERS))
    assert sentence in str(caught.value)


def test_a_pair_that_nothing_is_known_of_is_told():
    offers = parse_peers(HEAD + "a,barn,1,1,1\nb,LA,1,1,1\n")
    with pytest.raises(BadTable) as caught:
        link_matrices(offers, {})
    assert str(caught.value).startswith(
        "peers line 2: the table of regions does not know 'barn', and there is no link from 'a' to"
        " 'b'; add 'a,b,LATENCY_MS,MBPS' to the links, or use a location"
    )


def test_pairs_that_nothing_is_known_of_are_counted():
    offers = parse_peers(HEAD + "a,barn,1,1,1\nb,LA,1,1,1\nc,LA,1,1,1\n")
    with pytest.raises(BadTable, match=r"LATENCY_MS,MBPS' \(and one for each of 2 such pairs\)"):
        link_matrices(offers, {})


def test_files_of_spreadsheets_are_read():
    assert parse_peers("\ufeff" + PEERS.replace("\n", "\r\n")) == parse_peers(PEERS)
    assert parse_peers('\ufeffpeer,location,compute_s,slots,price_per_hour\r\n"a",LA,1,1,1\r\n')


# --- cards ----------------------------------------------------------------------------------------

CARDS_HEAD = "peer,location,card,price_per_hour\n"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100", "H100"),
        ("NVIDIA H100 SXM5", "H100"),
        ("rtx 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("GeForce RTX 3090", "RTX-3090"),
        ("Tesla T4", "T4"),
        ("A100 80GB", "A100-80GB"),
    ],
)
def test_cards_are_known_by_the_names_that_people_write(name, meant):
    card = card_named(name)
    assert card is not None
    assert card.name == meant


def test_common_cards_are_known_and_faster_ones_are_faster():
    wanted = ["T4", "RTX-3090", "RTX-4090", "A100", "L40S", "H100", "B200"]
    peaks = [CARDS[name].peak_flops for name in wanted]
    assert peaks == sorted(peaks)
    assert CARDS["H100"].forward_s(989e12 * 0.35) == pytest.approx(1)
    assert "not measured" in HOW


def test_a_card_gives_speed_and_memory_where_the_line_has_none():
    text = (
        CARDS_HEAD.replace("card", "card,compute_s,memory_gb")
        + "a,LA,H100,,,2\nb,LA,H100,1.5,40,2\n"
    )
    card, measured = parse_peers(text, forward_flops=989e12 * 0.35 / 4)
    assert (card.compute_us, card.memory_bytes, card.card) == (250_000, 80 * 10**9, "H100")
    assert (card.slots, card.price_per_hour) == (4, 2.0)
    assert (measured.compute_us, measured.memory_bytes, measured.card) == (
        1_500_000,
        40 * 10**9,
        None,
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a,LA,H10,2", "peers line 2: the table of cards has no 'H10'; did you mean H100 or"),
        ("a,LA,zzzzzz,2", "has no 'zzzzzz'. Known are B200, H200, H100,"),
        ("a,LA,,2", "peers line 2: neither compute_s nor card; name the card, or measure"),
        ("a,LA,H100,", "peers line 2: no price_per_hour; write 0 for a machine of your own"),
    ],
)
def test_a_card_or_a_price_that_is_missing_is_told(line, sentence):
    with pytest.raises(BadTable) as caught:
        parse_peers(CARDS_HEAD + line, forward_flops=1e12)
    assert sentence in str(caught.value)
