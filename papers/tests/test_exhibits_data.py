"""Every exhibit's data: whole configurations at every scale, claims about rows that exist."""

import dataclasses
import json
from functools import cache

import pytest
import torch

from helpers import tiny_decoder
from wakeful.config.keywords import options_from
from wakeful.config.model import ModelConfig
from wakeful.config.reading import LENGTH
from wakeful.config.schema import config_from_table
from wakeful.config.tables import read_table
from wakeful.data.mixture import mixture_of
from wakeful.data.preparing import load_data
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import first
from wakeful.inheritance.options import InheritOptions
from wakeful.model.decoder import Decoder
from wakeful.training.watching import DIAGNOSED_METRICS
from wakeful.variants import build_call
from wakeful_papers.exhibits.derived import DERIVED, check_figure
from wakeful_papers.exhibits.exhibit import (
    EQUAL_TRAINING,
    Claim,
    Heirs,
    Scale,
    _add_equal_training_claims,
    _Spec,
    exhibit_names,
    expand_papers,
    read_exhibit,
)
from wakeful_papers.exhibits.figures import task_figure_name
from wakeful_papers.exhibits.plan import Job, heirs_table, plan_exhibit
from wakeful_papers.exhibits.size import H100, operations_of, parameters_of, run_size
from wakeful_papers.exhibits.table import Column, PublishedTable, direction_of
from wakeful_papers.exhibits.total import NUM_CARDS, total_cost
from wakeful_papers.exhibits.tuning import Tuning
from wakeful_papers.heirs import Setting, find_baseline, last
from wakeful_papers.reports.charts import DRAWINGS

SCALES = ("tiny", "small", "paper")
TWO_CORES = 40e9
"""Operations a second that training reaches on two cores of a server, in float32, roughly."""
RUNNABLE = [name for name in exhibit_names() if not read_exhibit(name).settings]
PLAIN = {"loss", "perplexity", "excess_loss", "parameters", "cache_bytes", "tokens", "all_tokens",
         "steps_per_second", "step_milliseconds", "training_megabytes"}  # fmt: skip


def test_every_number_of_the_papers_is_listed() -> None:
    short = [name.replace("value-residual", "vr") for name in exhibit_names()]
    numbers = {name.split("-")[0].rstrip("abcd") for name in short}
    assert {f"vr/fig{n}" for n in (1, *range(3, 22))} <= numbers
    assert {f"vr/table{n}" for n in range(1, 6)} <= numbers
    assert {f"lazy/fig{n}" for n in range(1, 23)} <= numbers
    assert {f"lazy/table{n}" for n in (1, 2, 3, 4, 5, 6, 9, 10)} <= numbers
    assert {"activation/fig1", "activation/fig3"} <= numbers
    assert {f"activation/table{n}" for n in range(1, 7)} <= numbers
    # G and H are derivations, which figure 3 measures, as does I.
    assert {f"activation/appendix-{letter}" for letter in "jkl"} <= set(short)


def test_a_size_of_an_exhibit_has_its_own_values_rows_and_claims() -> None:
    medium, large, xl = (read_exhibit(f"lazy/fig5-{size}") for size in ("medium", "large", "xl"))
    heirs = [each.table.cells["heir", "loss"] for each in (medium, large, xl)]
    assert heirs == [2.81, 2.8, 2.64]
    presets = [each.compare["preset"] for each in (medium, large, xl)]
    assert presets == ["gpt2-medium", "gpt2-large", "gpt2-xl"]
    assert medium.title.startswith("Figure 5: 16 of 24 layers")
    assert read_exhibit("lazy/fig8-xl").title.endswith("GPT-2 xlarge")
    after = "loss_after(share=0.01)"
    assert [after in {claim.figure for claim in each.claims} for each in (medium, large, xl)] == [
        True, False, False,
    ]  # fmt: skip
    # A row that the paper has at some sizes alone; the size without a name is the file's.
    assert "softmax1" in read_exhibit("activation/table2").table.labels
    assert "softmax1" not in read_exhibit("activation/table2-1.4b").table.labels
    assert not any("{size}" in read_exhibit(name).title for name in exhibit_names())


def test_exhibits_stand_in_the_order_of_their_numbers() -> None:
    figures = [name for name in exhibit_names() if name.startswith("value-residual/fig")]
    assert figures[:4] == [f"value-residual/fig{n}" for n in ("1", "3", "4", "5-lengths")]
    assert figures[-1] == "value-residual/fig21"


@pytest.mark.parametrize("name", RUNNABLE)
def test_an_exhibit_is_whole_at_every_scale(name: str) -> None:
    found = read_exhibit(name)
    measured, every = set(), set()
    for scale in SCALES:
        plan = plan_exhibit(found, scale)
        groups, rows = {job.group for job in plan.jobs}, {job.row for job in plan.jobs}
        arms = {arm for each in plan.heirs.values() for arm in each.baseline}
        rows |= {EQUAL_TRAINING["reference"] if arm == "reference" else arm for arm in arms}
        rows |= set(plan.existing)
        assert rows
        here = {key for key, each in found.groups.items() if scale in (each.scales or SCALES)}
        assert groups == (here or {""} if plan.jobs else set())
        # Groups whose heirs alone differ share their reference.
        left, trained = ([job for job in plan.jobs if (plan.heirs_of(job) is not None) is inherits]
                         for inherits in (True, False))  # fmt: skip
        assert len({job.folder for job in trained}) == len(trained)
        tables = [heirs_table(plan, job, 3) for job in left]
        whole = [json.dumps([table, job.folder]) for table, job in zip(tables, left, strict=True)]
        assert len(set(whole)) == len(whole)
        for table, job in zip(tables, left, strict=True):
            if plan.reference_of(job.group):
                assert 0 < table["keep"] < 1
            else:
                assert 1 <= table["layers"] < job.config.model.num_layers
            assert table["train"]["seed"] == 3
            rows |= {"heir"}
            assert not {"tokenizer", "vocab_size"} & set(table["data"])
            options_from(InheritOptions, table)  # the options exist, and agree
        assert found.table.baseline in rows
        every |= rows
        claims = found.claims_at(scale, plan.tasks)
        for claim in claims:
            check_figure(claim.figure)
            assert {claim.row, claim.than or claim.row} <= rows
            assert {claim.group, claim.than_group} - {""} <= groups
            if claim.premise:
                check_figure(claim.premise.figure)
                assert {claim.premise.row} - {""} <= rows
        assert claims, "an exhibit that claims nothing cannot be judged"
        config = plan.jobs[0].config if plan.jobs else plan.config
        schemes = {*config.train.quantize.schemes, *found.schemes}
        measured = PLAIN | {f"{kind}_{s}" for s in schemes for kind in ("increase", "damage")}
        measured |= set(DIAGNOSED_METRICS) if config.train.diagnose.every else set()
        domains = mixture_of(config.data.source) or ()
        measured |= {f"loss_{domain.name}" for domain in domains}
        asked = (task.partition("@") for task in (*plan.tasks, "average"))
        measured |= {
            task_figure_name(task, metric, int(shots or 0))
            for task, _, shots in asked
            for metric in ("acc", "acc_norm")
        }
        columns = [
            c.figure for c in found.table.columns if scale == "paper" or "acc_" not in c.figure
        ]
        presupposed = [claim.premise.figure for claim in claims if claim.premise]
        for figure in columns + [claim.figure for claim in claims] + presupposed:
            assert not figure.isidentifier() or figure in measured | set(DERIVED), figure
    for expression in found.draw:
        build_call("draw", DRAWINGS, expression, folder="routes")
    labels = {key.rpartition(".")[2] for key in found.table.labels}
    assert labels <= every


@pytest.mark.parametrize("scale", ["tiny", "small"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_an_exhibit_runs_without_a_network(name: str, scale: Scale) -> None:
    """At tiny and small: no text, tokenizer, task or model of the hub."""
    plan = plan_exhibit(read_exhibit(name), scale)
    assert plan.tasks == ()
    for config in (plan.config, *(job.config for job in plan.jobs)):
        sources = [part.source for part in mixture_of(config.data.source) or ()]
        sources = sources or [config.data.source]
        assert set(sources) <= {"python-stdlib", "backcopy"} or all(
            source.startswith("python-stdlib") for source in sources
        )
        assert config.data.tokenizer == ""
    assert not plan.elsewhere.startswith("hf:")
    given = {each.source for each in (*plan.existing.values(), *plan.references.values())}
    assert given <= {"smollm2"}


def test_an_exhibit_of_tasks_is_judged_by_loss_where_they_are_not_asked() -> None:
    found = read_exhibit("value-residual/table1")
    plain, asked = (plan_exhibit(found, "tiny", tasks=tasks) for tasks in (False, True))
    assert asked.tasks == found.tasks
    assert len(asked.tasks) == 6
    assert {claim.figure for claim in found.claims_at("tiny", plain.tasks)} == {"loss"}
    figures = {claim.figure for claim in found.claims_at("tiny", asked.tasks)}
    assert figures == {"loss", "acc_average"}
    assert {claim.figure for claim in found.claims_at("paper", asked.tasks)} == {"acc_average"}
    assert plain.stand_in_notes == (
        f"validation loss in place of accuracy on {', '.join(found.tasks)}",
    )
    assert asked.stand_in_notes == ()


def test_a_heading_names_the_paper_once() -> None:
    assert read_exhibit("activation/table2").heading.count("From Attention to Activation") == 1
    assert read_exhibit("value-residual/fig6").heading.startswith(
        "Value Residual Learning: Figure 6"
    )
    assert read_exhibit("own/combination").heading == read_exhibit("own/combination").title


def test_the_paper_scale_is_the_papers() -> None:
    plan = plan_exhibit(read_exhibit("value-residual/fig5-lengths"), "paper")
    for job in plan.jobs:
        train = job.config.train
        assert train.length * train.batch_size == pytest.approx(2**21, rel=0.03)
        assert job.config.model.max_length == train.length
        # Table 2, of which all models are trained (section 4.1.1 and appendix A.4).
        mixture = mixture_of(job.config.data.source) or ()
        assert [each.share for each in mixture] == [0.5, 0.2, 0.1, 0.05, 0.05, 0.05, 0.05]
    assert plan.jobs[-1].config.train.length == 64_000
    sizes = plan_exhibit(read_exhibit("value-residual/table5"), "paper")
    millions = {
        job.group: round(run_size(job.config).parameters / 1e6)
        for job in sizes.jobs
        if job.row == "vanilla"
    }
    assert millions == {"m82": 82, "m180": 180, "m468": 468}
    # The tokenizer of the paper's scale gives the vocabulary that its preset has.
    for exhibit_name, count in {"table2": 64, "table2-130m": 124, "table2-350m": 354}.items():
        plan = plan_exhibit(read_exhibit(f"activation/{exhibit_name}"), "paper")
        assert {round(run_size(job.config).parameters / 1e6) for job in plan.jobs} == {count}
    rows = {
        job.row: job.config for job in plan_exhibit(read_exhibit("activation/table5"), "paper").jobs
    }
    assert (rows["vanilla"].model.norm, rows["vanilla"].model.bias) == ("layernorm", True)
    assert rows["sgd"].train.steps == 8 * rows["vanilla"].train.steps == 320_000


@pytest.mark.parametrize("scale", SCALES)
def test_all_models_of_from_attention_to_activation_have_its_norm_and_no_biases(
    scale: Scale,
) -> None:
    """Section 5; Table 5 alone varies them."""
    for name in RUNNABLE:
        if name.startswith("activation/") and name != "activation/table5":
            for job in plan_exhibit(read_exhibit(name), scale).jobs:
                model = job.config.model
                assert (model.norm, model.bias) == ("rmsnorm_single", False), name


def test_from_attention_to_activation_trains_what_the_paper_trained() -> None:
    def jobs(name: str) -> list[Job]:
        return list(plan_exhibit(read_exhibit(f"activation/{name}"), "paper").jobs)

    for job in jobs("fig3"):  # section 3: 130M where nothing else is said
        assert (job.config.model.num_layers, job.config.model.width) == (12, 768)
    for job in jobs("table6"):  # section 5: a batch of 512 where nothing else is said
        assert (job.config.train.batch_size, job.config.train.length) == (512, 1024)
    for ours in ("tiny", "small", "paper"):  # the runs of Table 3 are some of Table 2's
        plans = [
            plan_exhibit(read_exhibit(f"activation/{name}-llama"), ours)
            for name in ("table3", "table2")
        ]
        few, all_ = ({job.row: job.folder for job in plan.jobs} for plan in plans)
        assert few == {row: all_[row] for row in ("vanilla", "softmax1-orthoadam")}


def test_published_differences_are_those_of_the_published_figures() -> None:
    compared = 0
    for name in exhibit_names():
        found = read_exhibit(name)
        cells = found.table.cells
        for claim in found.claims:
            ours = cells.get((claim.row, claim.figure))
            theirs = cells.get((claim.than or found.table.baseline, claim.figure))
            if claim.published is None or claim.than_value is not None or claim.than_group:
                continue
            if isinstance(ours, int | float) and isinstance(theirs, int | float):
                assert claim.published == pytest.approx(ours - theirs, abs=6e-4), (name, claim.says)
                against = "higher" if ours < theirs else "lower"
                assert ours == theirs or claim.direction != against, (name, claim.says)
                compared += 1
    assert compared > 100


def test_an_exhibit_may_claim_its_tables_directions_and_more() -> None:
    claims = read_exhibit("activation/table2").claims
    assert {claim.than for claim in claims} == {"", "softmax1", "orthoadam"}
    assert sum(not claim.than for claim in claims) == 18
    rows = {(claim.row, claim.figure): claim.direction
            for claim in read_exhibit("activation/table5").claims if not claim.than}  # fmt: skip
    # "perplexity reduces and increases by 1.3 and 0.5" (section 5.3)
    assert rows["rotary", "perplexity"] == "lower"
    assert rows["no-positions", "perplexity"] == "higher"
    assert rows["softmax1", "perplexity"] == "same"


@pytest.mark.parametrize(
    "name",
    ["value-residual/fig4", "value-residual/fig7", "value-residual/fig15c", "lazy/table1-medium",
     "activation/table5", "own/arena", "own/combination", "active-dormant/backcopy-deep"],
)  # fmt: skip
def test_a_size_is_that_of_the_model_which_is_not_made(name: str) -> None:
    for model in {job.config.model for job in plan_exhibit(read_exhibit(name), "tiny").jobs}:
        with torch.device("meta"):
            made = Decoder(model).num_parameters()["total"]
        assert parameters_of(model) == made, model


def test_a_token_costs_what_multiplies_and_attention() -> None:
    """As docs/distributed.md counts it for 1.4B parameters: 8.02 · 10⁹."""
    large = config_from_table(read_table("activation-gpt2-1.4b"))
    assert operations_of(large.model, 512) == pytest.approx(8.02e9, rel=1e-3)
    model = ModelConfig(vocab_size=50, num_layers=3, num_heads=2, width=8, mlp_width=12)
    weights = 3 * (4 * 8 * 8 + 3 * 8 * 12 + 2 * 8) + 8 + 50 * 8
    keys = sum(range(1, 41)) / 40  # that the queries of a row of 40 tokens see, themselves included
    within = 6 * 4 * 3 * 8  # the diagonal, of which the definition counts half
    naive = 6 * weights + 3 * 3 * 2 * 2 * keys * 8
    assert operations_of(model, 40) == pytest.approx(naive, abs=within)
    tied = dataclasses.replace(model, tied=True)  # the table is looked up, and multiplies too
    assert operations_of(tied, 40) == operations_of(model, 40)
    near = dataclasses.replace(model, local_layers=(0, 2), local_theta=1e4, window=10)
    keys_near = sum(min(place, 10) for place in range(1, 41)) / 40
    naive -= 2 * 3 * 2 * 2 * (keys - keys_near) * 8
    assert operations_of(near, 40) == pytest.approx(naive, abs=within)
    # At 64,000 tokens attention is most of it.
    lengths = plan_exhibit(read_exhibit("value-residual/fig5-lengths"), "paper").jobs
    costs = {job.group: run_size(job.config).operations for job in lengths}
    assert costs["l64000"] > 4 * costs["l512"]


def test_eight_cards_are_as_fast_as_the_longest_run_allows() -> None:
    one = total_cost([plan_exhibit(read_exhibit("value-residual/fig3"), "paper")])
    assert one.runs == 1
    assert one.busiest_card == one.operations  # a run takes one card
    seeds = total_cost(
        [plan_exhibit(read_exhibit("value-residual/fig3"), "paper", seeds=range(NUM_CARDS + 1))]
    )
    assert seeds.busiest_card == pytest.approx(2 * one.operations)
    sizes = plan_exhibit(read_exhibit("value-residual/table5"), "paper")
    costs = sorted(piece.operations for piece in sizes.costs_by_folder.values())
    assert total_cost([sizes]).busiest_card == costs[-1]  # six runs of three sizes
    # Heirs begin when all rows are trained, and those of one reference take one card.
    plan = plan_exhibit(read_exhibit("lazy/fig5-medium"), "paper")
    rows = [piece.operations for piece in plan.costs_by_folder.values() if piece.stage == "rows"]
    assert len(rows) == 2  # the reference, and random for its steps and its heir's
    whole = total_cost([plan])
    assert whole.busiest_card == pytest.approx(whole.operations - min(rows))
    # The rows of several exhibits are trained side by side, then the heirs.
    both = total_cost([sizes, plan])
    heirs = [piece.operations for piece in plan.costs_by_folder.values() if piece.stage == "heirs"]
    assert both.busiest_card == pytest.approx(max(costs[-1], *rows) + sum(heirs))
    assert total_cost([plan, plan]).busiest_card == pytest.approx(whole.busiest_card)
    assert total_cost([plan]).operations / H100 > 3600


@pytest.mark.parametrize("name", RUNNABLE)
def test_an_exhibit_at_the_papers_scale_fits_on_one_h100(name: str) -> None:
    plan = plan_exhibit(read_exhibit(name), "paper")
    assert plan.memory < 80e9
    assert plan.memory_of(0) <= plan.memory_of(1) <= plan.memory_of(2) <= 2 * plan.memory


def test_heirs_train_what_when_attention_collapses_trains() -> None:
    plan = plan_exhibit(read_exhibit("lazy/table3-medium"), "paper")
    left = [job for job in plan.jobs if plan.heirs_of(job)]
    depths = {job.group: heirs_table(plan, job, 0)["layers"] for job in left}
    assert depths == {"layers12": 12, "layers14": 14, "layers16": 16}
    assert len({job.folder for job in left}) == 1
    job = left[-1]
    # Its three heirs, each with the reference trained on, and, beside the last, random for as many
    # steps and twice for twice as many: as the paper has it, and beside what an heir has had.
    train = job.config.train
    own = operations_of(job.config.model, 1024) * train.steps * train.batch_size * 1024
    assert total_cost([plan]).operations == pytest.approx(
        own * (1 + (0.5 + 1) + (0.5833 + 1) + (0.6667 + 1) + 0.6667 * (1 + 2 + 2)), rel=0.03
    )
    tokens = {}
    for name in ("lazy/table6", "lazy/table9"):
        plan = plan_exhibit(read_exhibit(name), "paper")
        for job in filter(plan.heirs_of, plan.jobs):
            table = heirs_table(plan, job, 0)
            train = table["train"]
            whole = train["steps"] * train["batch_size"] * train["length"]
            tokens[job.group] = (whole, table["data"].get("max_tokens", 0))
    assert tokens[""] == (pytest.approx(8e9, rel=0.05), pytest.approx(1e9, rel=0.05))
    assert tokens["large-many"] == tokens["other-many"] == (pytest.approx(50e9, rel=0.01), 0)


def test_no_arm_is_all_warmup() -> None:
    for scale in ("tiny", "small", "paper"):
        for name in ("lazy/fig3-medium", "lazy/growth", "lazy/fig22"):
            plan = plan_exhibit(read_exhibit(name), scale)
            for job in filter(plan.heirs_of, plan.jobs):
                table = heirs_table(plan, job, 0)
                warmup, steps = table["optimizer"]["warmup_steps"], table["train"]["steps"]
                assert warmup <= steps // 5, (name, scale, job.group)
                if scale == "paper":  # the paper's own
                    assert warmup == job.config.optimizer.warmup_steps


RECIPES = {
    "lazy/fig2": "heirs of four layers beside a start from scratch, as the paper reads them",
    "lazy/fig3": "the lazy half and the first beside a start from scratch",
    "lazy/fig15": "parts of blocks beside a start from scratch",
    "lazy/table2": "parts of blocks beside a start from scratch",
    "lazy/table4": "heirs of four layers beside a start from scratch",
    "lazy/fig4": "growth until parity beside training from scratch",
    "lazy/fig5": "the heir beside training from scratch",
    "lazy/fig6": "the heir beside training from scratch, on another text",
    "lazy/fig7": "the heir beside distillation and training from scratch",
    "lazy/fig14": "the heir beside stacking, which has no reference",
    "lazy/fig16": "the heir beside training from scratch, of half the layers",
    "headline/heirs": "the heir beside training from scratch, stacking and distillation",
    "lazy/growth": "tokens until parity, of which a start from scratch takes its own",
    "lazy/table1": "the heir beside stacking, which has no reference",
    "lazy/table3": "the heir beside training from scratch, for as many steps and for twice as many",
    "lazy/table5": "the heir beside training from scratch, by tasks",
}
"""Exhibits that set the paper's whole recipe beside one that takes nothing, and what they compare.

The public code of the paper copies the head with the blocks, tied to the token embeddings: beside
random is how its figures are to be read. What blocks alone give is judged between equal embeddings.
"""


@cache
def has_the_references_embeddings(arm: str) -> bool:
    if arm in ("heir", "reference", EQUAL_TRAINING["reference"]):
        return True
    if arm == EQUAL_TRAINING["random"]:
        return False
    reference = tiny_decoder()
    setting = Setting(reference, first(2, of=4), seed=5, lazy=last(2, of=4))
    ours = find_baseline(arm).start(setting).embed.weight
    return torch.equal(ours, reference.embed.weight[:, : ours.shape[1]])


def test_blocks_are_compared_between_the_same_embeddings_and_head() -> None:
    found = set()
    for name in exhibit_names():
        shown = read_exhibit(name)
        if shown.inherit is None:
            continue
        for claim in shown.claims:
            if claim.than_value is not None or claim.than_group:
                continue
            arms = claim.row, claim.than or shown.table.baseline
            if len({has_the_references_embeddings(arm) for arm in arms}) > 1:
                found.add(name.partition("-")[0])
    assert found == set(RECIPES)


@pytest.mark.parametrize("name", ["fig2", "table4", "fig3-medium"])
def test_the_whole_lazy_heir_is_judged_beside_plain_random(name: str) -> None:
    """As the public code of When Attention Collapses copies it: blocks, head and embeddings."""
    lazy = "lazy" if name == "fig3-medium" else "last"
    claims = read_exhibit(f"lazy/{name}").claims
    pairs = {(claim.row, claim.than): claim for claim in claims}
    for than in ("random", "embeddings"):
        found = pairs[lazy, than]
        assert found.direction == "same"
        assert found.premise is not None
        assert found.premise.figure == "lazy_layers"
    for scale in SCALES:
        arms = [
            plan_exhibit(read_exhibit(f"lazy/{each}"), scale).heirs[""]
            for each in ("fig2", "table4")
        ]
        assert arms[0] == arms[1]  # which they share


def test_an_heir_is_judged_beside_as_much_training() -> None:
    """As the paper does, after equal steps of its own, and below its scale trained alike too."""
    judged = 0
    for name in RUNNABLE:
        found = read_exhibit(name)
        if found.inherit is None:
            continue
        for scale in SCALES:
            plan = plan_exhibit(found, scale)
            beside = {
                claim.than or found.table.baseline
                for claim in found.claims_at(scale, plan.tasks)
                if claim.row in ("heir", "middle") and claim.direction != "same"
                and not claim.than_group and claim.than_value is None
                and not claim.figure.endswith("tokens")
            }  # fmt: skip
            for theirs, alike in EQUAL_TRAINING.items():
                assert alike not in beside or theirs in beside, name
            judged += len(beside & set(EQUAL_TRAINING.values()))
            for job in plan.jobs:
                if job.row != EQUAL_TRAINING["random"]:
                    continue
                (reference,) = (
                    each for each in plan.jobs
                    if each.group == job.group and each.row == "reference"
                )  # fmt: skip
                table = heirs_table(plan, reference, 0)
                steps = reference.config.train.steps + table["train"]["steps"]
                assert job.config.train.steps == steps
                assert job.config.model.num_layers == table["layers"]
                assert plan.heirs_of(job) is None
    assert judged > 40
    fig5 = {claim.says: claim for claim in read_exhibit("lazy/fig5-medium").claims}
    assert fig5["the heir is below random"].scales == ()
    alike = fig5["the heir is below random, trained for the steps of both"]
    assert (alike.than, alike.published, alike.direction) == ("random_total", None, "lower")
    assert alike.own
    assert not fig5["the heir is below random"].own
    fast = [says for says in fig5 if says.startswith("the heir converges as fast as its reference")]
    assert fast == ["the heir converges as fast as its reference"]  # of equal starts alone
    # Nobody knows the steps of a published reference.
    assert EQUAL_TRAINING["reference"] not in {
        claim.than for claim in read_exhibit("lazy/table6").claims_at("paper", ("mmlu@5",))
    }


def test_a_claim_of_heirs_of_a_published_model_alone_is_judged_where_that_is() -> None:
    claim = Claim(says="the heir is below", row="heir", direction="lower", scales=("paper",))
    spec = _Spec(title="t", claim="c", baseline="reference", inherit=Heirs(), claims=(claim,))
    scales = {"tiny": {}, "small": {}, "paper": {"references": {"all": {}}}}
    assert [*_add_equal_training_claims(spec, scales)] == [claim]


def test_an_arm_is_evaluated_as_often_as_its_reference_or_ten_times() -> None:
    """After 1,000 of 100,000 steps the losses of figure 5 are known."""
    often = {}
    for scale in SCALES:
        plan = plan_exhibit(read_exhibit("lazy/fig5-medium"), scale)
        train = heirs_table(plan, plan.jobs[0], 0)["train"]
        often[scale] = (train["steps"], train["eval_every"])
    assert often == {"tiny": (100, 10), "small": (1000, 100), "paper": (100_000, 1000)}


def test_a_model_of_the_papers_own_scale_is_left_out_at_the_others() -> None:
    found = read_exhibit("lazy/table9")
    for scale in SCALES:
        plan = plan_exhibit(found, scale, tasks=True)
        there = "other-many" in {job.group for job in plan.jobs}
        assert there == (scale == "paper")
        claims = found.claims_at(scale, plan.tasks)
        assert ("other-many" in {claim.group for claim in claims}) == there


def test_the_start_token_stands_in_every_window_where_the_paper_has_it() -> None:
    """Appendix A.2 of Value Residual Learning: it is the same in all sequences."""
    assert not config_from_table(read_table("value-residual-82m")).data.bos
    for name, rows in {"fig10": 2, "fig19": 4}.items():
        for scale in SCALES:
            jobs = plan_exhibit(read_exhibit(f"value-residual/{name}"), scale).jobs
            assert [job.config.data.bos for job in jobs] == [True] * rows


def test_the_paper_scale_looks_at_as_many_windows_as_the_papers_do() -> None:
    shown = read_exhibit("value-residual/fig10")
    assert [plan_exhibit(shown, scale).exhibit.looks for scale in SCALES] == [8, 8, 1000]
    looks = {name: plan_exhibit(read_exhibit(name), "paper").exhibit.looks for name in RUNNABLE}
    assert all(
        type(each) is int and each >= read_exhibit(name).looks for name, each in looks.items()
    )
    # Sections 3.2 and 4.5 and appendix A.2 of Value Residual Learning.
    sampled = {f"value-residual/fig{number}" for number in (1, 3, 10, 11, 12, 19, 20)}
    assert {name for name in looks if name.startswith("value-residual/")
            and looks[name] == 1000} == sampled  # fmt: skip
    plan = plan_exhibit(read_exhibit("activation/table1"), "paper")
    assert plan.tokens_per_seed == 256 * LENGTH
    assert {
        piece.tokens for piece in plan.costs_by_folder.values() if piece.stage == "reading"
    } == {plan.tokens_per_seed}
    for name in RUNNABLE:
        if name.startswith("activation/"):
            for job in plan_exhibit(read_exhibit(name), "paper").jobs:
                train = job.config.train
                windows = (train.diagnose.num_sequences, train.quantize.num_sequences)
                assert windows == (256, 2048), name


def test_growth_is_counted_with_all_the_rounds_that_it_may_take() -> None:
    plan = plan_exhibit(read_exhibit("lazy/fig4"), "tiny", seeds=[0])
    (job,) = plan.jobs
    (name,) = (name for name in plan.costs_by_folder if "heirs" in name)
    heirs, reference = plan.costs_by_folder[name], plan.costs_by_folder[f"{job.folder}/seed-0"]
    # Six of twelve layers and one more a round; then random once and for twice the steps, at_once
    # for all seven rounds, and the reference trained on.
    assert heirs.runs == 7 + 4
    depths = [layers / 12 for layers in range(6, 13)]
    assert heirs.tokens / reference.tokens == pytest.approx(sum(depths) + 1 + 2 + 7 + 1)


def test_rows_keep_their_ratios_at_a_smaller_scale() -> None:
    rows = {
        job.row: job.config for job in plan_exhibit(read_exhibit("activation/table5"), "tiny").jobs
    }
    assert (rows["vanilla"].train.steps, rows["sgd"].train.steps) == (100, 800)
    plan = plan_exhibit(
        read_exhibit("value-residual/fig14"), "tiny", changes={"train.steps": 7}, seeds=[4]
    )
    assert plan.seeds == (4,)
    assert {job.config.train.length for job in plan.jobs} == {16, 64, 256, 1000, 2000}
    assert {job.config.train.steps for job in plan.jobs} == {7}
    assert {job.config.data.source for job in plan.jobs} == {"python-stdlib"}


def test_what_exhibits_share_is_counted_once() -> None:
    alone = plan_exhibit(read_exhibit("value-residual/fig12"), "tiny")
    other = plan_exhibit(
        read_exhibit("value-residual/fig20"), "tiny"
    )  # of the same runs and no others
    one, both = total_cost([alone]), total_cost([alone, other])
    assert (one.runs, one.tokens) == (6, 6 * 120 * 32 * 64)
    one_token = [run_size(job.config).operations for job in alone.jobs]
    assert one.operations == pytest.approx(one.tokens * sum(one_token) / len(one_token))
    assert both == one
    first = f"{alone.jobs[0].folder}/seed-0"
    left = total_cost([alone], lambda name: name == first)
    assert (left.runs, left.tokens) == (5, 5 * 120 * 32 * 64)
    # Heirs of one reference: it is counted once, and each of its heirs and their rivals.
    heirs = plan_exhibit(read_exhibit("lazy/table3-medium"), "tiny")
    # Beside each heir its reference trained on, beside the last random for all the steps.
    assert total_cost([heirs]).runs == 3 * (1 + 3 + 2 + 3 + 1)
    looks = total_cost([plan_exhibit(read_exhibit("lazy/fig9"), "tiny")])
    assert (looks.runs, looks.disk) == (3, 0)
    large = max((alone, heirs), key=lambda plan: plan.memory)
    assert total_cost([alone, heirs]).memory == large.memory


def test_all_exhibits_at_the_tiny_scale_take_less_than_two_and_a_half_hours_on_two_cores() -> None:
    """Attention is counted, of sequences of up to 2,000 tokens."""
    total = total_cost(plan_exhibit(read_exhibit(name), "tiny") for name in RUNNABLE)
    assert total.operations / TWO_CORES < 2.5 * 3600


def test_a_model_of_a_task_has_the_tasks_vocabulary() -> None:
    job = plan_exhibit(read_exhibit("active-dormant/backcopy"), "small").jobs[0]
    data = load_data(job.config.data)
    model = dataclasses.replace(job.config.model, vocab_size=data.vocab_size)
    assert run_size(job.config).parameters == parameters_of(model)


def test_an_exhibit_that_does_not_exist_or_waits_is_refused() -> None:
    with pytest.raises(WakefulError, match="did you mean 'value-residual/fig6'"):
        read_exhibit("value-residual/figure6")
    # Of a number with suffixes these, not what is only spelled alike.
    for written, meant in {
        "value-residual/fig5": ("fig5-lengths", "fig5-sizes"),
        "lazy/fig1": ("fig1-large", "fig1-medium", "fig1-xl"),
        "value-residual/fig15": ("fig15a", "fig15b", "fig15c"),
    }.items():
        *most, final = (f"'{written.partition('/')[0]}/{name}'" for name in meant)
        with pytest.raises(WakefulError, match=f"mean {', '.join(most)} or {final}\\?"):
            read_exhibit(written)
    # Without its paper it is that of every paper.
    for written, meant in {
        "fig6": ("lazy/fig6-large", "lazy/fig6-medium", "value-residual/fig6"),
        "table2": ("activation/table2", "lazy/table2", "value-residual/table2"),
        "fig15": ("lazy/fig15", *(f"value-residual/fig15{letter}" for letter in "abcd")),
        "Figure6": ("lazy/fig6-large", "lazy/fig6-medium", "value-residual/fig6"),
        "arena": ("own/arena",),
        "activation-table2": ("activation/table2",),
    }.items():
        *most, final = map(repr, meant)
        told = f"mean {', '.join(most)}{' or ' if most else ''}{final}\\?"
        with pytest.raises(WakefulError, match=told):
            read_exhibit(written)
    with pytest.raises(WakefulError, match="no exhibit 'nothing'; wakeful reproduce lists them"):
        read_exhibit("nothing")
    with pytest.raises(WakefulError, match="lists settings and has nothing to measure"):
        plan_exhibit(read_exhibit("value-residual/table4"), "tiny")
    with pytest.raises(WakefulError, match=r"layersx"):
        check_figure("layersx(metric='rank')")


def test_the_headline_has_at_most_sixty_five_claims_and_says_how_its_rates_are_chosen() -> None:
    names = [name for name in exhibit_names() if name.startswith("headline/")]
    assert expand_papers(["headline"]) == tuple(names)
    assert expand_papers(["lazy/fig1-xl", "headline"]) == ("lazy/fig1-xl", *names)
    assert expand_papers(["fig6"]) == ("fig6",)
    plans = {name: plan_exhibit(read_exhibit(name), "small") for name in names}
    claims = sum(len(plan.exhibit.claims_at("small", plan.tasks)) for plan in plans.values())
    assert 30 <= claims <= 65
    # At the paper's scale Table 2's own runs, and nothing to train beside them.
    outliers = {name: plan_exhibit(read_exhibit(name), "paper") for name in
                ("headline/outliers", "activation/table2-130m")}  # fmt: skip
    few, whole = ({job.folder for job in plan.jobs} for plan in outliers.values())
    assert len(few) == 3
    assert few < whole
    values = plans["headline/values"]
    assert len(values.jobs) == 16
    assert values.seeds == (0, 1, 2, 3, 4)
    assert {job.config.train.steps for job in values.jobs} == {6000}
    rules = {name: plan.tuning for name, plan in plans.items()}
    assert rules.pop("headline/outliers") is None  # its rate is what grows the outliers
    assert set(rules.values()) == {Tuning()}
    assert Tuning().seed not in {seed for plan in plans.values() for seed in plan.seeds}
    assert {job.row for job in plans["headline/heirs"].tuned_jobs} == {"reference"}
    assert plan_exhibit(read_exhibit("headline/values"), "paper").tuning is None


def test_a_direction_is_the_papers_difference_beyond_its_share() -> None:
    column = Column("x", "x", 0.05)
    cells: dict[tuple[str, str], float | str] = {
        ("a", "x"): 100, ("b", "x"): 104, ("c", "x"): 106, ("d", "x"): 90.0, ("e", "x"): "lower"
    }  # fmt: skip
    table = PublishedTable("t", "n", "a", (column,), dict.fromkeys("abcdef", "l"), cells)
    found = {row: direction_of(table, row, column) for row in "abcdef"}
    assert found == {"a": None, "b": "same", "c": "higher", "d": "lower", "e": "lower", "f": None}
    cells["e", "x"] = "below"
    with pytest.raises(WakefulError, match="t: 'below' must be one of lower, higher, same"):
        direction_of(table, "e", column)
    # Beside a published zero only a zero is the same.
    cells |= {("a", "x"): 0.0, ("b", "x"): 0.0}
    assert [direction_of(table, row, column) for row in "bc"] == ["same", "higher"]


def test_a_table_with_cells_has_its_baselines_row() -> None:
    tables = [read_exhibit(name).table for name in exhibit_names()]
    assert [each.title for each in tables if each.cells and each.baseline not in each.labels] == []
