"""The patients of Guo et al., as presets and as exhibits."""

import pytest

from wakeful.config.schema import config_from_table, read_seeds, split_variants
from wakeful.config.tables import read_table
from wakeful_papers.exhibits.exhibit import SCALES, read_exhibit
from wakeful_papers.exhibits.plan import plan_exhibit


def test_every_patient_has_three_seeds_and_follows_its_heads() -> None:
    for name in ("patient", "patient-rotary", "patient-deep"):
        table = read_table(name)
        assert read_seeds(table) == [0, 1, 2]
        configs = {
            key: config_from_table(entry) for key, entry in split_variants(name, table).items()
        }
        assert all(config.train.diagnose.heads for config in configs.values())
        layers = {config.model.num_layers for config in configs.values()}
        assert layers == {3 if name == "patient-deep" else 1}
        # A value from the first layer is the layer's own where there is one layer.
        assert ("resformer" in configs) == (name == "patient-deep")
    assert configs["all"].optimizer.name == "orthoadam"
    assert pytest.approx(3e-3) == configs["vanilla"].optimizer.lr


def test_the_papers_claims_tell_a_sink_from_uniform_attention() -> None:
    """That is 1/n of a query that sees n keys; of row 0, which sees BOS alone, nothing is asked."""
    found = read_exhibit("active-dormant/backcopy")
    levels = {claim.figure: (claim.direction, claim.than_value)
              for claim in found.claims if claim.row == "vanilla"}  # fmt: skip
    assert set(levels) == {"bos_mass_other", "bos_mass_trigger"}
    (grown, dormant), (faded, active) = levels["bos_mass_other"], levels["bos_mass_trigger"]
    assert (grown, faded) == ("higher", "lower")
    assert dormant is not None
    assert active is not None
    for scale in SCALES:
        length = plan_exhibit(found, scale).config.train.length
        uniform = sum(1 / keys for keys in range(2, length + 1)) / (length - 1)
        assert 2 * active < uniform < dormant / 3


@pytest.mark.parametrize("name", ["backcopy", "backcopy-deep"])
def test_the_papers_scale_has_the_optimizers_of_the_authors_scripts(name: str) -> None:
    jobs = plan_exhibit(read_exhibit(f"active-dormant/{name}"), "paper").jobs
    rows = {job.row: job.config.optimizer for job in jobs}
    adam, sgd = rows["vanilla"], rows["sgd"]
    assert (adam.lr, adam.beta1, adam.beta2, adam.weight_decay) == (3e-4, 0.9, 0.99, 1e-4)
    name = "torch.optim:SGD(momentum=0.9)"
    assert (sgd.name, sgd.lr, sgd.weight_decay) == (name, 0.03, 1e-4)
    assert all(each.final_lr == each.lr for each in rows.values())
