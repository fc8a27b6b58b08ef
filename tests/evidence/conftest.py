"""Records are a plain module beside the tests."""

import gc
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _cheap_collections():
    """statsmodels collects garbage in every correction: what is imported by then need not be looked at again."""
    import scipy.stats
    import statsmodels.stats.multitest
    import statsmodels.stats.power
    import statsmodels.stats.weightstats

    assert scipy.stats
    assert statsmodels.stats
    gc.freeze()
    yield
    gc.unfreeze()
