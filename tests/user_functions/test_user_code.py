"""Which modules and classes are the user's own."""

import argparse
import builtins
import importlib
import sys
import types

import numpy as np
import pytest

import dask_image_ingest
from dask_image_ingest.user_functions.user_code import is_user_code


def test_what_is_installed_is_not_the_users():
    generator = type(np.random.default_rng)  # of a module that only compiled code knows
    for value in (np, np.mean, np.ndarray, argparse, argparse.Namespace, dask_image_ingest):
        assert not is_user_code(value)
    for value in (builtins, sys, dict, types.SimpleNamespace, generator, type(np.mean)):
        assert not is_user_code(value)


class Own:
    pass


def test_modules_of_the_users_are_with_and_without_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "folder_of_test").mkdir()
    (tmp_path / "folder_of_test" / "inner.py").write_text("def f(): ...")
    inner = importlib.import_module("folder_of_test.inner")
    for value in (Own, inner, inner.f, sys.modules["folder_of_test"], sys.modules[__name__]):
        assert is_user_code(value)


@pytest.mark.parametrize("registered", [True, False])
def test_a_notebooks_classes_are_the_users(registered, monkeypatch):
    notebook = types.ModuleType("notebook_of_test")
    if registered:
        monkeypatch.setitem(sys.modules, "notebook_of_test", notebook)
    exec("class Settings: ...\ndef f(): ...", vars(notebook))
    assert is_user_code(notebook.Settings)
    assert is_user_code(notebook.f)
