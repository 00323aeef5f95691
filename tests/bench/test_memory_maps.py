"""Memory by kinds: what an smaps file says, counted on the right account."""

from bench.memory_maps import Area, Kind, areas_of, held

SMAPS = """\
55d0c0000000-55d0c0100000 rw-p 00000000 00:00 0                          [heap]
Size:               1024 kB
Rss:                 900 kB
Pss:                 900 kB
Pss_Dirty:           900 kB
VmFlags: rd wr mr mw me ac sd
7f0000000000-7f0000400000 rw-s 00000000 00:01 1025                       /memfd:loco-codes (deleted)
Size:               4096 kB
Rss:                4096 kB
Pss:                2048 kB
VmFlags: rd sh mr mw me ms sd
7f0000400000-7f0000800000 rw-p 00000000 00:00 0
Rss:                4000 kB
Pss:                4000 kB
7f0000800000-7f0000900000 r-xp 00000000 fe:00 7  /opt/my env/site-packages/torch/lib/libtorch_cpu.so
Rss:                 500 kB
Pss:                 100 kB
"""


def test_mappings_are_read_with_their_names_and_sizes():
    areas = list(areas_of(SMAPS.splitlines()))
    assert [area.rss_bytes // 1024 for area in areas] == [900, 4096, 4000, 500]
    assert [area.pss_bytes // 1024 for area in areas] == [900, 2048, 4000, 100]
    assert areas[0].name == "[heap]"
    assert areas[2].name == ""
    assert areas[3].name.endswith("/my env/site-packages/torch/lib/libtorch_cpu.so")
    assert list(areas_of([])) == []


def test_what_the_trainer_shares_counts_once_and_in_full():
    now = held(areas_of(SMAPS.splitlines()), [Area("p2pd", 70, 30)], code_bytes=6000 * 1024)
    assert now.pss[Kind.CODES] == now.alone[Kind.CODES] == 4096 * 1024
    assert now.alone[Kind.TORCH] == 500 * 1024
    assert now.pss[Kind.TORCH] == 100 * 1024
    assert (now.alone[Kind.P2PD], now.pss[Kind.P2PD]) == (70, 30)
    assert now.pss_bytes == (900 + 4096 + 4000 + 100) * 1024 + 30
    assert now.alone_bytes == (900 + 4096 + 4000 + 500) * 1024 + 70


def test_private_memory_as_large_as_a_vector_is_told_from_the_heap():
    areas = [Area("", 4000, 4000), Area("", 3000, 3000), Area("[heap]", 5000, 5000)]
    now = held(areas, [], code_bytes=7000)
    assert now.alone[Kind.VECTORS] == 4000
    assert now.alone[Kind.HEAP] == 8000


def test_numba_and_other_libraries_are_told_apart():
    names = ["/x/llvmlite/binding/libllvmlite.so", "/x/numba/_dispatcher.so", "/usr/lib/libc.so.6"]
    kinds = [Area(name, 1, 1).kind(10) for name in names]
    assert kinds == [Kind.NUMBA, Kind.NUMBA, Kind.OTHER_FILES]
