"""The exchange of a peer that holds a stage, put together from its parts."""

from pathlib import Path

from peer.observe.facts import Facts
from peer.ports import Network, Work
from peer.process.bell import Bell
from peer.training.stages.sizes import SLOTS
from protocol.membership.records import Sign
from protocol.microbatch.core import StageCore
from protocol.microbatch.data_peer import DataPeerCore
from protocol.microbatch.relay import RelayCore
from protocol.routing.planned_paths import PlannedRouter
from protocol.routing.routers import path_rules, router_of, terms_of
from protocol.run.run_spec import RunSpec
from protocol.run.stages import DATA_STAGE

from .company import StageCompany
from .exchange import PATIENCE_S, StageExchange
from .given_paths import FILE_NAME, GivenPaths
from .survey import Survey


def stage_exchange(
    spec: RunSpec,
    stage: int,
    company: StageCompany,
    network: Network,
    facts: Facts,
    heard: Bell,
    *,
    sign: Sign,
    work: Work,
    state_dir: Path,
) -> StageExchange:
    """The exchange of a peer that holds this stage."""
    core: StageCore
    planned: PlannedRouter | None = None
    if stage == DATA_STAGE:
        router = router_of(spec, network.peer_id, path_rules(spec, SLOTS))
        planned = router if isinstance(router, PlannedRouter) else None
        core = DataPeerCore(network.peer_id, router, PATIENCE_S, in_flight=SLOTS)
    else:
        core = RelayCore(SLOTS, PATIENCE_S)
    survey = Survey(
        stage=stage,
        company=company,
        network=network,
        facts=facts,
        sign=sign,
        work=work,
        terms=terms_of(spec, SLOTS),
        router=planned,
        full=spec.pipeline.full_every > 0,
        given=GivenPaths(state_dir / FILE_NAME, company.stage_of),
    )
    return StageExchange(
        stage=stage,
        core=core,
        company=company,
        network=network,
        facts=facts,
        heard=heard,
        total_steps=spec.total_rounds * spec.sync.inner_steps,
        survey=survey,
    )
