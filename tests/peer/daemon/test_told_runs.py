"""What a run takes is told to founders and joiners, before a state is taken."""

from swarm_worlds import simulated, start, toy_spec

from simulation.swarm import open_swarm

SPEC = toy_spec(rounds=2)


@simulated()
async def test_a_peer_hears_what_its_run_is_before_it_takes_a_state(tmp_path):
    async with open_swarm(1, SPEC, tmp_path) as swarm:
        await start(swarm, "a", "b")
        for name in ("a", "b"):
            ((spec, corpus_tokens, has_state),) = swarm[name].told
            assert spec.training == SPEC.training
            assert corpus_tokens > 0
            assert not has_state
