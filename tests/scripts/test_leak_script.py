"""scripts/leak_on_noise.py: what leaky routing does where nothing can be learnt."""

import pytest
from running import REPOSITORY


@pytest.mark.slow
def test_only_leaky_routing_predicts_noise(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    import leak_on_noise

    leaky = leak_on_noise.train_and_score("smlp_leaky_tiny", num_updates=120)
    partial = leak_on_noise.train_and_score("smlp_partial_tiny", num_updates=30)
    assert leaky.one_pass < 7.7 and leaky.stepwise > 8, leaky
    assert partial.one_pass > 7.9 and partial.stepwise == pytest.approx(partial.one_pass, rel=1e-4), partial
