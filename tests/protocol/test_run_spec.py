"""The run spec: refuses what cannot work, and is one sequence of bytes for everybody."""

import json
import re

import pytest

from protocol.errors import InvalidRunSpec
from protocol.limits import MAX_SPEC_BYTES, MAX_STAGES
from protocol.pipeline.problem import PathRules
from protocol.pipeline.question import BOUNDARY_CODECS
from protocol.run.run_spec import (
    AUTO_ROUND_STEPS,
    MAX_SHOWN_CHARS,
    RunSpec,
    parse_bytes,
    parse_toml,
    run_id_of,
    validated,
)
from protocol.run.sections import (
    BOUNDARY_BITS,
    MAX_STEPS,
    DilocoSection,
    MuonSection,
    NolocoSection,
)

AUTO = '[sync]\ninner_steps = "auto"\n'


def test_where_peers_choose_their_rounds_the_nominal_one_is_the_same_for_all() -> None:
    spec = parse_toml(f"[training]\ntotal_steps = 1000\n{AUTO}")
    assert (spec.sync.inner_steps, spec.sync.round_steps) == ("auto", AUTO_ROUND_STEPS)
    assert spec.total_rounds == 16
    assert parse_bytes(spec.to_bytes()) == spec
    assert parse_toml("[sync]\ninner_steps = 7").sync.round_steps == 7


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ('method = "diloco"', 'a schedule of fragments by H.* use "noloco"'),
        ('method = "streaming"', "a schedule of fragments by H"),
        ("overlap = false", "without overlap no rounds fill the line"),
        ("[pipeline]\nstages = 2", "stages choose no rounds of their own"),
    ],
)
def test_where_rounds_are_of_one_length_for_all_nobody_chooses(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=f"^sync.inner_steps: .*{sentence}.* .got 'auto'.$"):
        parse_toml(AUTO + toml)


def test_an_empty_file_is_a_valid_spec() -> None:
    assert parse_toml("") == RunSpec()


def test_bytes_are_canonical_and_come_back() -> None:
    spec = parse_toml("seed = 3\n[sync]\ninner_steps = 10\n")
    assert parse_bytes(spec.to_bytes()) == spec
    assert b" " not in spec.to_bytes()
    assert list(json.loads(spec.to_bytes())) == sorted(json.loads(spec.to_bytes()))


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("sead = 1", "unknown key 'sead'; did you mean 'seed'"),
        ("[model]\nhiden_size = 8", "unknown key 'model.hiden_size'; did you mean 'hidden_size'"),
        ("[modle]\nhidden_size = 8", "unknown key 'modle'; did you mean 'model'"),
        ("[training]\nbatch_size = 0", r"training.batch_size: .*greater than or equal to 1"),
        ("[model]\nhidden_size = 100\nnum_heads = 3", r"multiple of 2 \* num_heads"),
        ("[model]\nnum_heads = 4\nnum_kv_heads = 3", "multiple of num_kv_heads"),
        ('model.family = "qwen_3"', r"^model.family: unknown: use .*; did you mean 'qwen3'\? .got"),
        ('model.family = "zzzz"', r"^model.family: unknown: use one of llama, [^?]* .got 'zzzz'.$"),
        ("model.experts = 4", "^model.experts: says nothing to 'llama': use family = 'mixtral'"),
        ("model.balance = 0.0", "^model.balance: says nothing to 'llama'"),
        (
            'model = { family = "mixtral", experts = 4, experts_per_token = 5 }',
            "^model.experts_per_token: must be 1 to 4, the experts .got 5.$",
        ),
        (
            'model.family = "gemma3_text"\npipeline.stages = 2\n',
            "^pipeline.stages: 'gemma3_text' is not cut into stages; llama, qwen2, .* are .got 2.$",
        ),
        ("[sync]\ngamma = 2.0", "diverges"),
        ("[data]\nsource = 'http:x'", "unknown data source"),
        ("[sync", "not TOML"),
        ("[sync]\nmethod = ['noloco']", "sync.method"),
        ('name = "a b"', "name"),
        ("[sync]\ninner_steps = 0", "^sync.inner_steps: must be .* 1 to .*, or 'auto' .got 0.$"),
        ("[sync]\ninner_steps = 2.5", "^sync.inner_steps: must be a whole number"),
        ("[sync]\ninner_steps = true", "^sync.inner_steps: must be a whole number"),
    ],
)
def test_what_cannot_work_is_refused_with_advice(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=sentence):
        parse_toml(toml)


@pytest.mark.parametrize(
    "toml", ['method = "gasloc"', "gasloc.momentum = 0.2", 'method = "gasloc"\ngasloc = {}']
)
def test_gasloc_which_is_gone_is_refused_with_what_to_do(toml: str) -> None:
    with pytest.raises(InvalidRunSpec, match=r"gasloc.*; it is gone: commit 6613df92 .* new one$"):
        parse_toml(f"[sync]\n{toml}\n")


def test_a_signed_run_of_gasloc_is_refused_and_other_signed_bytes_are_as_they_were() -> None:
    signed = RunSpec().to_bytes()
    assert b',"gasloc":null,' in signed
    assert parse_bytes(signed) == RunSpec()
    of_gasloc = signed.replace(b'"gasloc":null', b'"gasloc":{"momentum":0.2}')
    for data in (of_gasloc, of_gasloc.replace(b'"noloco"', b'"gasloc"')):
        with pytest.raises(InvalidRunSpec, match="gasloc.*; it is gone: commit 6613df92"):
            parse_bytes(data)
    with pytest.raises(InvalidRunSpec, match="not in canonical form"):
        parse_bytes(signed.replace(b'"gasloc":null,', b""))


DILOCO = '[sync]\nmethod = "diloco"\n'


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        (
            "[model]\nhidden_size = 100\nnum_heads = 3",
            "model.hidden_size: must be a multiple of 2 * num_heads (6) (got 100)",
        ),
        (
            "[model]\nnum_heads = 4\nnum_kv_heads = 3",
            "model.num_heads: must be a multiple of num_kv_heads (3) (got 4)",
        ),
        (
            "[data]\nsource = 'http:x'",
            (
                "data.source: unknown data source; use one of stdlib, text, tokens, jsonl, parquet,"
                " hf, chat (got 'http:x')"
            ),
        ),
        (
            "[sync]\ngamma = 2",
            "sync.gamma: diverges: must be below sqrt(2 + alpha^2) = 1.414 (got 2.0)",
        ),
        (
            "[sync]\nbeta = 3",
            "sync.beta: diverges: must be below sqrt(2 + alpha^2) = 1.414 (got 3.0)",
        ),
        (
            "[sync.diloco]\nmomentum = 0.5",
            "sync.method: [sync.diloco] needs method = \"diloco\" (got 'noloco')",
        ),
        (
            "[sync]\ncodec = 'int4'",
            (
                "sync.codec: too coarse for whole weights: use one of int8, int8-diff, bf16, fp32"
                " (got 'int4')"
            ),
        ),
        (
            "[sync]\ncodec = 'int5'",
            "sync.codec: unknown: use one of int8, int8-diff, bf16, fp32, int4 (got 'int5')",
        ),
        (
            DILOCO + "codec = 'e3m0'",
            (
                "sync.codec: unknown: use one of int8, int8-diff, bf16, fp32, int4 (got 'e3m0'); it"
                " is gone: commit 6613df92 had it last; go on with the run in that, or found a new"
                " one"
            ),
        ),
        (
            DILOCO + "[sync.diloco]\nerror_feedback = true",
            (
                "unknown key 'sync.diloco.error_feedback'; it is gone: commit 6613df92 had it last;"
                " go on with the run in that, or found a new one"
            ),
        ),
        (
            DILOCO + "final_averaging = false",
            (
                "sync.final_averaging: says nothing to diloco; its keys are in [sync.diloco]"
                " (got False)"
            ),
        ),
        (
            DILOCO + "inner_steps = 5\n[sync.diloco]\noverlap_steps = 7",
            (
                "sync.inner_steps: must be above diloco.overlap_steps (7): a fragment comes back"
                " before it is sent again; raise it, or lower overlap_steps (got 5)"
            ),
        ),
        ("[frozen]\nparameters = 1", "frozen.config: Field required"),
        (
            f"[training]\ntotal_steps = {10**20}",
            (f"training.total_steps: must be less than or equal to {MAX_STEPS} (got {10**20})"),
        ),
        (
            f"[sync]\ninner_steps = {10**20}",
            (
                f"sync.inner_steps: must be a whole number from 1 to {MAX_STEPS}, or 'auto'"
                f" (got {10**20})"
            ),
        ),
        (
            "[optimizer]\nweight_decay = inf",
            "optimizer.weight_decay: must be a finite number (got inf)",
        ),
    ],
)
def test_the_sentence_names_the_key_and_its_value_and_no_other(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec) as refused:
        parse_toml(toml)
    assert str(refused.value).split("; frozen")[0] == sentence


def test_a_long_value_is_cut() -> None:
    with pytest.raises(InvalidRunSpec) as refused:
        parse_toml(f"seed = {'x' * 200!r}")
    assert str(refused.value).endswith(f" (got {'x' * 200!r:.{MAX_SHOWN_CHARS}}...)")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b",", b", ", 1),
        lambda data: b"{}",
        lambda data: data[:-1],
        lambda data: b"[]",
        lambda data: b"\xff" + data,
        lambda data: data + b" " * MAX_SPEC_BYTES,
        lambda data: b"[" * 100_000,
    ],
)
def test_bytes_that_are_not_canonical_are_refused(change) -> None:
    with pytest.raises(InvalidRunSpec):
        parse_bytes(change(RunSpec().to_bytes()))


def test_run_id_names_spec_and_founder() -> None:
    ids = {
        run_id_of(RunSpec().to_bytes(), b"a" * 32),
        run_id_of(RunSpec().to_bytes(), b"b" * 32),
        run_id_of(RunSpec(seed=1).to_bytes(), b"a" * 32),
    }
    assert len(ids) == 3
    assert run_id_of(RunSpec().to_bytes(), b"a" * 32) in ids
    assert all(len(run_id) == 32 for run_id in ids)


def test_a_run_that_was_founded_before_there_was_a_choice_of_optimizer_keeps_its_id() -> None:
    """The id was written down before `optimizer.name` was a key, and averages were plain."""
    spec = parse_toml("[sync]\nalpha = 0.3\nbeta = 0.7\n")
    assert run_id_of(spec.to_bytes(), b"a" * 32) == "9f81f071e774a7bc7de670813f8f4405"
    assert b"muon" not in spec.to_bytes()


def test_a_run_that_was_founded_when_error_feedback_was_a_key_keeps_its_id() -> None:
    """The id was written down before; at its default the key is accepted, and says nothing."""
    spec = parse_toml(DILOCO + "[sync.diloco]\nerror_feedback = false")
    assert spec == parse_toml(DILOCO) == parse_bytes(spec.to_bytes())
    assert run_id_of(spec.to_bytes(), b"a" * 32) == "f553604877f47c47300c5ca92f68860a"
    with_feedback = spec.to_bytes().replace(b'"error_feedback":false', b'"error_feedback":true')
    with pytest.raises(InvalidRunSpec, match="error_feedback.; it is gone: commit 6613df92"):
        parse_bytes(with_feedback)


def test_a_family_without_experts_says_nothing_of_them_in_signed_bytes() -> None:
    assert b"balance" not in RunSpec().to_bytes() + parse_toml(EXPERTS).to_bytes()
    spec = parse_toml('model = { family = "mixtral", experts = 4 }')
    assert json.loads(spec.to_bytes())["model"]["experts"] == 4
    assert parse_bytes(spec.to_bytes()) == spec


def test_a_default_that_is_left_out_of_the_bytes_may_not_be_in_them() -> None:
    tree = json.loads(RunSpec().to_bytes())
    tree["optimizer"]["name"] = "adamw"
    with pytest.raises(InvalidRunSpec, match="canonical"):
        parse_bytes(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())


def test_rounds_are_whole() -> None:
    spec = parse_toml("[training]\ntotal_steps = 101\n[sync]\ninner_steps = 50\n")
    assert spec.total_rounds == 3


def test_gamma_is_beta_unless_given() -> None:
    assert RunSpec().sync.effective_gamma == RunSpec().sync.beta
    assert parse_toml("[sync]\ngamma = 1.0").sync.effective_gamma == 1.0


def test_diloco_brings_its_section_and_noloco_none() -> None:
    assert parse_toml('[sync]\nmethod = "diloco"\n').sync.diloco == DilocoSection()
    assert parse_toml("").sync.diloco is None


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[sync.diloco]\nmomentum = 0.5\n", "needs method"),
        ('[sync]\ncodec = "int4"\n', "too coarse for whole weights"),
        ('[sync]\nmethod = "diloco"\nalpha = 0.5\n', "sync.alpha: says nothing to diloco"),
        ('[sync]\nmethod = "diloco"\ncodec = "int8-diff"\n', "sync.codec: only for ways in pairs"),
        ('[sync]\nmethod = "diloco"\n[sync.diloco]\noverlap = 1\n', "did you mean 'overlap_steps'"),
    ],
)
def test_keys_of_the_other_method_are_refused(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=sentence):
        parse_toml(toml)


def test_muon_brings_its_section_and_adamw_none() -> None:
    assert parse_toml('[optimizer]\nname = "muon"\n').optimizer.muon == MuonSection()
    assert parse_toml("").optimizer.muon is None


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        (
            "[optimizer.muon]\nmomentum = 0.9\n",
            r'optimizer.name: \[optimizer.muon\] needs name = "muon"',
        ),
        ('[optimizer]\nname = "sgd"\n', "optimizer.name: must be 'adamw' or 'muon'"),
        (
            '[optimizer]\nname = "muon"\n[optimizer.muon]\nlr = 1\n',
            "unknown key 'optimizer.muon.lr'",
        ),
        ('[optimizer]\nname = "muon"\n[optimizer.muon]\nadjust_lr = "rms"\n', "adjust_lr"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=sentence):
        parse_toml(toml)


def test_a_run_with_muon_travels_as_canonical_bytes() -> None:
    spec = parse_toml('[optimizer]\nname = "muon"\n[optimizer.muon]\nlearning_rate = 0.02\n')
    assert parse_bytes(spec.to_bytes()) == spec
    assert json.loads(spec.to_bytes())["optimizer"]["muon"]["learning_rate"] == 0.02
    assert run_id_of(spec.to_bytes(), b"a" * 32) != run_id_of(RunSpec().to_bytes(), b"a" * 32)


def test_streaming_gossip_has_noloco_s_factors_and_diloco_s_fragments() -> None:
    spec = parse_toml(
        '[sync]\nmethod = "streaming"\nalpha = 0.1\nbeta = 1.0\nfinal_averaging = false\n'
        '[sync.streaming]\nfragments = "sequential"\nblocks_per_fragment = 2\n'
    )
    assert spec.sync.method == "noloco"
    assert spec.sync.noloco == NolocoSection(fragments="sequential", blocks_per_fragment=2)
    assert parse_bytes(spec.to_bytes()) == spec
    assert parse_toml('[sync]\nmethod = "streaming"\n').sync.noloco == STRIDED


STRIDED = NolocoSection(fragments="strided")


def test_fragments_in_pairs_are_signed_as_the_method_that_they_were() -> None:
    spec = parse_toml('[sync]\ninner_steps = 20\n[sync.noloco]\nfragments = "strided"\n')
    old = parse_toml('[sync]\ninner_steps = 20\nmethod = "streaming"\n')
    assert spec == old
    assert spec.sync.noloco == STRIDED
    signed = json.loads(spec.to_bytes())["sync"]
    assert signed["method"] == "streaming"
    assert signed["streaming"] == {"blocks_per_fragment": 3, "fragments": "strided"}
    assert "noloco" not in signed
    assert parse_bytes(spec.to_bytes()) == spec


def test_whole_models_in_pairs_are_signed_as_before_there_was_a_choice() -> None:
    spec = parse_toml('[sync.noloco]\nfragments = "whole"\n')
    assert spec == RunSpec()
    signed = json.loads(spec.to_bytes())["sync"]
    assert (signed["method"], signed["streaming"], "noloco" in signed) == ("noloco", None, False)


def test_a_run_signed_with_one_fragment_in_the_middle_of_rounds_needs_an_older_version() -> None:
    tree = json.loads(parse_toml('[sync]\ninner_steps = 20\nmethod = "streaming"\n').to_bytes())
    tree["sync"]["streaming"]["fragments"] = "whole"
    signed = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(InvalidRunSpec, match="commit c7cbd76b had it last"):
        parse_bytes(signed)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("gamma = 0.7", "sync.gamma: says nothing to fragments in pairs"),
        ("overlap = false", "sync.overlap: says nothing to fragments in pairs"),
        ("beta = 1.5", r"sync.beta: diverges: must be below sqrt\(2 \+ alpha\^2\)"),
        ('codec = "int4"', "too coarse for whole weights"),
        ("[sync.streaming]\npattern = 1", "unknown key"),
        ("[sync.diloco]\nmerge = 0.5", "needs method"),
        ('[sync.streaming]\nfragments = "whole"', "commit c7cbd76b had it last"),
        ("streaming = 3", "unknown key 'sync.streaming'"),
    ],
)
def test_what_says_nothing_to_streaming_gossip_is_refused(keys: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=sentence):
        parse_toml(f'[sync]\nmethod = "streaming"\n{keys}\n')


@pytest.mark.parametrize("method", ["noloco", "diloco", "bogus"])
def test_a_section_of_streaming_without_its_method_is_told_its_new_name(method: str) -> None:
    with pytest.raises(InvalidRunSpec, match=r"^sync\.streaming: is \[sync\.noloco\] now"):
        parse_toml(f"[sync]\nmethod = '{method}'\n[sync.streaming]\nfragments = 'strided'\n")


@pytest.mark.parametrize(("overlap_steps", "inner_steps"), [(1, 1), (10, 10), (11, 10)])
def test_a_fragment_comes_back_before_it_is_sent_again(
    overlap_steps: int, inner_steps: int
) -> None:
    def toml(steps: int) -> str:
        run = f'[sync]\nmethod = "diloco"\ninner_steps = {inner_steps}\n'
        return run + f"[sync.diloco]\noverlap_steps = {steps}\n"

    sentence = rf"must be above diloco.overlap_steps \({overlap_steps}\).* \(got {inner_steps}\)"
    with pytest.raises(InvalidRunSpec, match=sentence):
        parse_toml(toml(overlap_steps))
    assert parse_toml(toml(inner_steps - 1)).sync.diloco is not None


def test_a_run_of_diloco_travels_as_canonical_bytes() -> None:
    spec = parse_toml('[sync]\nmethod = "diloco"\n[sync.diloco]\noverlap_steps = 5\n')
    assert parse_bytes(spec.to_bytes()) == spec


# --- pipelines ------------------------------------------------------------------------------------


def test_a_run_without_the_section_has_no_pipeline() -> None:
    pipeline = parse_toml("").pipeline
    assert (pipeline.stages, pipeline.num_visited, pipeline.full_every) == (1, 1, 0)
    assert parse_toml("[pipeline]\nstages = 1\n").to_bytes() == RunSpec().to_bytes()


@pytest.mark.parametrize(("stages", "visited"), [(2, 2), (3, 2), (4, 3), (6, 4), (8, 6)])
def test_three_quarters_of_the_stages_are_visited(stages: int, visited: int) -> None:
    spec = parse_toml(f"[model]\nnum_layers = 8\n[pipeline]\nstages = {stages}\n")
    assert spec.pipeline.num_visited == visited


def test_a_pipeline_travels() -> None:
    toml = '[pipeline]\nstages = 4\nvisited = 4\nmax_jump = 3\nfull_every = 10\ncodec = "int8"\n'
    spec = parse_toml(toml)
    assert parse_bytes(spec.to_bytes()).pipeline == spec.pipeline
    assert spec.pipeline.num_visited == 4
    assert run_id_of(spec.to_bytes(), bytes(32)) != run_id_of(RunSpec().to_bytes(), bytes(32))


def test_a_run_that_was_founded_when_stages_could_change_places_keeps_its_id() -> None:
    """The id was written down before; at their defaults the keys are accepted, and say nothing."""
    keys = "stages = 4\nmax_jump = 3\n"
    spec = parse_toml(f"[pipeline]\n{keys}max_swaps = 0\nmax_swap_distance = 1\nmax_swap_sum = 2\n")
    assert spec == parse_toml(f"[pipeline]\n{keys}") == parse_bytes(spec.to_bytes())
    assert run_id_of(spec.to_bytes(), b"a" * 32) == "fc0b3ac60dde4a4526fb7798a058b309"
    with pytest.raises(InvalidRunSpec, match="max_swaps.; it is gone: commit d6cbf1c2"):
        parse_bytes(spec.to_bytes().replace(b'"max_swaps":0', b'"max_swaps":2'))


SWAPS_GONE = "unknown key 'pipeline.max_swaps'; it is gone: commit d6cbf1c2 had it last"


def test_limits_of_paths_are_those_of_the_planner() -> None:
    assert RunSpec().pipeline.max_jump == PathRules().max_jump
    sizes = [BOUNDARY_BITS[codec] for codec in BOUNDARY_CODECS]
    assert sizes == [32, 16, 8]


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("stages = 0", "pipeline.stages: must be greater than or equal to 1 (got 0)"),
        (
            "stages = 5",
            "pipeline.stages: a stage needs a layer; at most model.num_layers (4) (got 5)",
        ),
        (
            "visited = 2",
            "pipeline.visited: needs stages above 1; leave it out, or raise stages (got 2)",
        ),
        ("stages = 3\nvisited = 4", "pipeline.visited: must be 2 to 3, the stages (got 4)"),
        (
            "stages = 3\nvisited = 1",
            "pipeline.visited: must be greater than or equal to 2 (got 1)",
        ),
        ("max_swaps = 2", SWAPS_GONE),
        ("max_swaps = false", SWAPS_GONE),
        (
            "max_swap_distance = 5",
            "unknown key 'pipeline.max_swap_distance'; it is gone: commit d6cbf1c2 had it last",
        ),
        (
            "max_swap_sum = 0",
            "unknown key 'pipeline.max_swap_sum'; it is gone: commit d6cbf1c2 had it last",
        ),
        ("max_jump = 0", "pipeline.max_jump: must be greater than or equal to 1 (got 0)"),
        ("full_every = -1", "pipeline.full_every: must be greater than or equal to 0"),
        ("codec = 'zip'", "pipeline.codec: must be 'fp32', 'bf16' or 'int8' (got 'zip')"),
        (
            "codec = 'int4'",
            (
                "pipeline.codec: must be 'fp32', 'bf16' or 'int8' (got 'int4'); it is gone: commit"
                " 6613df92 had it last"
            ),
        ),
        ("routing = 'best'", "pipeline.routing: must be 'planned' or 'random'"),
        ("stage = 2", "unknown key 'pipeline.stage'; did you mean 'stages'?"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec) as refused:
        parse_toml(f"[pipeline]\n{toml}\n")
    assert str(refused.value).startswith(sentence)


def test_a_checkpoints_layers_are_not_guessed() -> None:
    spec = parse_toml('[model]\ninit_from = "some/model"\n[pipeline]\nstages = 12\n')
    assert spec.pipeline.stages == 12


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[optimizer]\nlearning_rate = true", "optimizer.learning_rate: .*valid number .got True."),
        ('[training]\nbatch_size = "8"', "training.batch_size: .*valid integer .got '8'."),
        ("[sync]\noverlap = 1", "sync.overlap: .*valid boolean .got 1."),
        (
            '[training]\ncompile = "no"',
            "training.compile: must be true, false or 'auto' .got 'no'.",
        ),
        ("[optimizer]\nbetas = [0.9, true]", "optimizer.betas.1: .*valid number .got True."),
        ("[optimizer]\nbetas = 0.9", "optimizer.betas: must be a list .got 0.9."),
        ('[optimizer]\nname = "muon"\nmuon = 0', "optimizer.muon: must be a section .got 0."),
        ('[sync]\nmethod = "diloco"\ndiloco = false', "sync.diloco: must be a section"),
    ],
)
def test_one_kind_of_value_is_not_taken_for_another(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=f"^{sentence}"):
        parse_toml(toml)


def test_what_a_part_leaves_out_is_as_in_the_spec_beside_it() -> None:
    beside = parse_toml('seed = 3\n[optimizer]\nname = "muon"\nwarmup_steps = 7\n')
    part = parse_toml("[optimizer.muon]\nlearning_rate = 0.5\n", beside=beside)
    assert (part.seed, part.optimizer.warmup_steps) == (3, 7)
    assert part.optimizer.muon == MuonSection(learning_rate=0.5)
    with pytest.raises(InvalidRunSpec, match='needs name = "muon"'):
        parse_toml("[optimizer.muon]\nlearning_rate = 0.5\n")


def test_a_section_in_two_forms_is_told():
    assert parse_toml("training.total_steps = 5") == parse_toml("[training]\ntotal_steps = 5")
    with pytest.raises(InvalidRunSpec, match=r"not TOML: .*twice.*section\.key, or below \[sec"):
        parse_toml("training.total_steps = 5\n[training]\nbatch_size = 2")


# --- experts --------------------------------------------------------------------------------------
EXPERTS = """
[training]
total_steps = 1000
[[experts]]
name = "general"
[[experts]]
name = "code"
source = "text:code/*.txt"
model.num_layers = 6
training.total_steps = 500
[[experts]]
name = "math"
source = "text:math/*.txt"
[ensemble]
top = 3
"""


def test_experts_travel_as_canonical_bytes_that_no_default_can_change() -> None:
    spec = parse_toml(EXPERTS)
    assert parse_bytes(spec.to_bytes()) == spec
    signed = json.loads(spec.to_bytes())
    assert signed["experts"][1]["model"] == {**signed["model"], "num_layers": 6}
    assert signed["experts"][2]["training"] == signed["training"]
    assert [each["begin"] for each in signed["experts"]] == ["fresh", "fresh", "seed"]
    assert signed["ensemble"]["anchor"] == "general"


def test_a_run_that_was_founded_before_there_were_experts_keeps_its_id() -> None:
    """The id was written down before."""
    signed = RunSpec().to_bytes()
    assert run_id_of(signed, b"a" * 32) == "2e07adc46e8a05a95562381b43c0ec79"
    tree = {**json.loads(signed), "experts": [], "ensemble": None}
    with pytest.raises(InvalidRunSpec, match="canonical"):
        parse_bytes(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())


def test_an_expert_is_a_run_by_itself() -> None:
    spec = parse_toml(EXPERTS)
    code = spec.of_expert(1)
    assert (code.data.source, code.model.num_layers) == ("text:code/*.txt", 6)
    assert (code.total_rounds, code.experts, code.ensemble) == (10, (), None)
    assert spec.of_expert(0) == parse_toml("[training]\ntotal_steps = 1000")
    assert parse_bytes(code.to_bytes()) == code


def test_an_expert_that_begins_with_a_checkpoint_takes_it_as_a_run_does() -> None:
    spec = parse_toml(EXPERTS.replace("[ensemble]", 'begin = "some/model"\n[ensemble]'))
    assert spec.of_expert(2).model.init_from == "some/model"
    assert spec.of_expert(1).model.init_from is None


def test_experts_part_in_the_middle_of_the_generalist_unless_it_is_said() -> None:
    assert parse_toml(EXPERTS).branch_round == 10
    assert parse_toml(EXPERTS + "branch_round = 20\n").branch_round == 20
    assert parse_toml(EXPERTS + "branch_round = 0\n").branch_round == 0


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "model.num_layers",
            "model.num_layer",
            "unknown key 'experts.code.model.num_layer'; did you mean 'num_layers'?",
        ),
        ("source", "sources", "unknown key 'experts.code.sources'; did you mean 'source'?"),
        ("top = 3", "tp = 3", "unknown key 'ensemble.tp'; did you mean 'top'?"),
        ('"math"', '"code"', "experts: two have one name; give each its own (got 'code')"),
        ('name = "math"', "", "experts.2.name: Field required"),
        ('"math"', '"seed"', "experts.seed.name: is a word of the run spec; choose another"),
        (
            'source = "text:math/*.txt"',
            "",
            "experts.math.source: an expert needs a domain of its own",
        ),
        ('"text:math/*.txt"', '"http:x"', "experts.math.source: unknown data source"),
        (
            'name = "general"',
            'name = "general"\nsource = "stdlib"',
            "experts.general.source: the first expert is the generalist, whose text is data.source",
        ),
        (
            'name = "general"',
            'name = "general"\nbegin = "seed"',
            "experts.general.begin: the first expert is the seed of the others",
        ),
        (
            "model.num_layers = 6",
            'tokenizer = "gpt2"',
            "experts.code.tokenizer: all experts have one tokenizer",
        ),
        (
            "model.num_layers = 6",
            "model.context_length = 64",
            "experts.code.model.context_length: must be 128: all experts are asked about equal",
        ),
        (
            "model.num_layers = 6",
            'model.num_layers = 6\nbegin = "seed"',
            "experts.code.begin: 'general' has other sizes (num_layers), so its weights do not fit",
        ),
        (
            "model.num_layers = 6",
            "model.hidden_size = 100",
            "experts.code.model.hidden_size: must be a multiple of 2 * num_heads (8) (got 100)",
        ),
        ("model.num_layers = 6", "model = 3", "experts.code.model: must be a section (got 3)"),
        (
            "model.num_layers = 6",
            'model.init_from = "x"',
            "experts.code.model.init_from: an expert's `begin` names its checkpoint (got 'x')",
        ),
        ("top = 3", "top = 0", "ensemble.top: must be greater than or equal to 1 (got 0)"),
        ("top = 3", "discount = 0", "ensemble.discount: must be greater than 0 (got 0)"),
        ("top = 3", "fixed_share = 2", "ensemble.fixed_share: must be less than or equal to 1"),
        ("top = 3", 'shared = "trunk"', "ensemble.shared: must be 'none' (got 'trunk')"),
        ("top = 3", 'anchor = "code"', "ensemble.anchor: must be 'general', the first expert, or"),
        (
            "top = 3",
            "branch_round = 21",
            "ensemble.branch_round: the generalist has 20 rounds; branch in one of them (got 21)",
        ),
        ("top = 3", "[pipeline]\nstages = 2", "pipeline.stages: experts are whole models so far"),
        ("top = 3", '[model]\ninit_from = "x"', "model.init_from: with [[experts]] the first one"),
    ],
)
def test_experts_that_cannot_be_are_refused(old: str, new: str, sentence: str) -> None:
    assert old in EXPERTS
    with pytest.raises(InvalidRunSpec) as refused:
        parse_toml(EXPERTS.replace(old, new))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("experts = 3", "experts: must be a list (got 3)"),
        ('experts = ["a"]', "experts.0: must be a section (got 'a')"),
        ("[[experts]]\nmodel = 3\n[[experts]]", "experts.0.name: Field required"),
        ("[ensemble]\ntop = 2", "ensemble: needs [[experts]]"),
        ('[[experts]]\nname = "a"', "experts: one model needs no experts"),
        ('[[experts]]\nname = "a"\n' * (MAX_STAGES + 1), "experts: Tuple should have at most 64"),
    ],
)
def test_what_is_no_list_of_experts_is_refused(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec) as refused:
        parse_toml(toml)
    assert str(refused.value).startswith(sentence)


def test_a_strangers_spec_costs_little_and_says_what_a_terminal_can_show() -> None:
    keys = {f"unknown{number}": 1 for number in range(200)}
    for experts in (64, 1000):
        with pytest.raises(InvalidRunSpec) as refusal:
            validated({"experts": [{}] * experts, "model": keys})
        assert len(str(refusal.value)) < 20 * MAX_SHOWN_CHARS
    name = "\x1b]0;mine\x07\nloco-peer: all is well" + "x" * 2000
    with pytest.raises(InvalidRunSpec) as refusal:
        validated({"experts": [{"name": name, "\x1b[2J": 1}], "\x1b[2J" + "y" * 500: 1})
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 20 * MAX_SHOWN_CHARS


def test_frozen_experts_of_two_tokenizers_are_refused() -> None:
    tree = json.loads(parse_toml(EXPERTS).to_bytes())
    for expert, tokens in zip(tree["experts"], (256, 300, 256), strict=True):
        expert["frozen"] = {
            "config": json.dumps({"vocab_size": tokens}),
            "layout_digest": "0" * 32,
            "parameters": 1,
            "padded_parameters": 128,
        }
    signed = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    of_one = signed.replace(b"300", b"256")
    assert parse_bytes(of_one).to_bytes() == of_one, "without a digest of weights, as before"
    with pytest.raises(InvalidRunSpec, match=r"^experts\.code\.frozen\.config: all .* one token"):
        parse_bytes(signed)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("[adapter]\nrank = 4", "model.init_from: must name the checkpoint that [adapter] is for"),
        (
            "[adapter]\n[model]\ninit_from = 'x'\n[pipeline]\nstages = 2\n[sync]\ninner_steps = 5",
            "pipeline.stages: adapters are of whole models: leave [adapter] or the stages out",
        ),
        (
            "[adapter]\n[[experts]]\nname = 'a'\n[[experts]]\nname = 'b'\nsource = 'stdlib'",
            "adapter: experts train whole models",
        ),
        (
            "[[experts]]\nname = 'a'\n[[experts]]\nname = 'b'\nsource = 'chat:x'",
            "data.source: experts are compared by whole texts: use another source than 'chat'",
        ),
        (
            "data.replay = 'stdlib'\n[[experts]]\nname = 'a'\n[[experts]]\nname = 'b'",
            "data.replay: experts have a text each: leave it out",
        ),
        (
            "[data]\nreplay = 'chat:x'\n[pipeline]\nstages = 2\n[sync]\ninner_steps = 5",
            "data.source: stages learn whole texts",
        ),
        ("data.replay = 'http:x'", "data.replay: unknown data source"),
        (
            "data.replay = 'stdlib'\ndata.replay_share = 0.999",
            "data.replay_share: must be less than or equal to 0.99",
        ),
        ("data.replay_share = 0.5", "data.replay_share: says nothing without data.replay"),
    ],
)
def test_adapters_and_conversations_are_of_one_whole_model(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=re.escape(sentence)):
        parse_toml(toml)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        (
            "data.mask_documents = true\npipeline.stages = 2",
            "data.mask_documents: stages see no tokens, so not where documents end: leave one of",
        ),
        (
            "data.mask_documents = true\ndata.source = 'chat:x'",
            "data.mask_documents: no token of its own ends a conversation, so none can be",
        ),
        (
            "data.document_end = 3",
            "data.document_end: says nothing without mask_documents: leave it out (got 3)",
        ),
        ("optimizer.moments = 'fp16'", "optimizer.moments: must be 'fp32' or 'bf16' (got 'fp16')"),
        (
            "optimizer.moments = 'bf16'\noptimizer.betas = [0.9, 0.999]",
            "optimizer.moments: needs betas and momentum up to 0.99: slower moments would stand",
        ),
        (
            "optimizer.moments = 'bf16'\noptimizer.name = 'muon'\noptimizer.muon.momentum = 0.995",
            "optimizer.moments: needs betas and momentum up to 0.99",
        ),
        ("training.compile = 1", "training.compile: must be true, false or 'auto' (got 1)"),
    ],
)
def test_how_a_step_cannot_be_computed(toml: str, sentence: str) -> None:
    with pytest.raises(InvalidRunSpec, match=re.escape(sentence)):
        parse_toml(toml)


def test_how_a_step_is_computed_is_signed_where_it_is_chosen_alone() -> None:
    """`compile` was always there: a signed false stays false, and a later 'auto' is another run."""
    plain = json.loads(RunSpec().to_bytes())
    assert plain["training"]["compile"] is False
    assert not {"mask_documents", "document_end"} & plain["data"].keys()
    assert "moments" not in plain["optimizer"]
    chosen = parse_toml(
        "training.compile = 'auto'\noptimizer.moments = 'bf16'\ndata.mask_documents = true"
    )
    assert parse_bytes(chosen.to_bytes()) == chosen
    assert json.loads(chosen.to_bytes())["training"]["compile"] == "auto"


def test_a_run_without_adapters_and_conversations_keeps_its_bytes() -> None:
    spec = parse_toml("[model]\ninit_from = 'x'")
    assert b"adapter" not in spec.to_bytes()
    assert b"chat_template" not in spec.to_bytes()
    assert b"replay" not in spec.to_bytes()
    replaying = parse_toml("data.replay = 'stdlib'")
    assert parse_bytes(replaying.to_bytes()) == replaying
    adapted = parse_toml("[model]\ninit_from = 'x'\n[adapter]\ntargets = ['q_proj']")
    assert parse_bytes(adapted.to_bytes()) == adapted
