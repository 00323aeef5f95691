"""The exchange of a peer that holds a stage, put together from its parts."""

from peer.training.ring import MIN_SLOTS, SLOTS
from protocol.microbatch.core import StageCore
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.routing.routers import PlannedRouter, plan_of, router_of, terms_of
from protocol.run.amendments import AmendedSpec
from protocol.run.layout import DATA_STAGE

from .company import StageCompany
from .exchange import PATIENCE_S, StageExchange, Surroundings
from .survey import Planner, Survey


def stage_exchange(
    amended: AmendedSpec,
    stage: int,
    company: StageCompany,
    around: Surroundings,
    plan: Planner = plan_of,
) -> StageExchange:
    """The exchange of a peer that holds this stage.

    Args:
        plan: makes the paths of a data peer.
    """
    spec, network, facts = amended.founding, around.network, around.facts
    core: StageCore
    planned: PlannedRouter | None = None
    if stage == DATA_STAGE:
        router = router_of(spec, network.peer_id, MIN_SLOTS)
        planned = router if isinstance(router, PlannedRouter) else None
        core = DataPeerCore(network.peer_id, router, PATIENCE_S, in_flight=SLOTS)
    else:
        core = RelayCore(SLOTS, PATIENCE_S)
    survey = Survey(
        stage=stage,
        company=company,
        network=network,
        facts=facts,
        sign=around.sign,
        work=around.work,
        terms=terms_of(spec),
        router=planned,
        full=spec.pipeline.full_every > 0,
        plan=plan,
    )
    return StageExchange(
        stage=stage,
        core=core,
        company=company,
        around=around,
        total_steps_at=amended.total_steps_at,
        survey=survey,
    )
