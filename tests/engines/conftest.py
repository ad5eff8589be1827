"""Engines collect garbage when they close; what the imports left is no garbage."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="session")
def _imports_are_no_garbage():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
