from demo.experts import SIZES, ExpertsSummary, experts_spec
from demo.plan import to_toml
from protocol.run.needs import parameters_of
from protocol.run.run_spec import parse_toml


def test_three_sizes_survive_the_file():
    spec = experts_spec(3, 40)
    assert parse_toml(to_toml(spec)) == spec
    assert [expert.name for expert in spec.experts] == [*SIZES]
    assert len({parameters_of(model) for model in spec.models}) == 3


def test_an_expert_off_its_budget_loses():
    expert = {"name": "code", "parameters": 10, "tokens": 1000, "validation_loss": 2.0}
    assert ExpertsSummary([expert], 1050).won
    lost = ExpertsSummary([expert, {**expert, "tokens": 1300}], 1050)
    assert not lost.won
    assert "NOT EVERY EXPERT" in lost.describe()[-1]
