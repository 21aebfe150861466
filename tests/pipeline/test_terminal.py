"""Commands that are named in what is printed can be typed as they stand."""

from pipeline import terminal


def test_a_command_in_what_is_said_names_the_project_unless_it_would_be_taken_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = terminal.Hints()
    said.commands = lambda: ("train", "latents", "panel", "evaluate")
    said.about(tmp_path / "my cats", made=tmp_path / "example")
    own = f"PROJECT='{tmp_path}/my cats'"  # make runs in the checkout
    assert said("not built: make latents") == f"not built: make latents {own}"
    assert said("run: latentmill train, or make train") == f"run: latentmill train -p 'my cats', or make train {own}"
    assert said("`latentmill panel unused` says why") == "`latentmill panel -p 'my cats' unused` says why"
    others = "run: make train PROJECT=/x|latentmill train --x -p /y|latentmill families|make trainers|a/latentmill train"
    for whole in others.split("|"):
        assert said(whole) == whole
    said.about(tmp_path / "example", made=tmp_path / "example")
    assert said("make train; latentmill train") == "make train; latentmill train -p example"
    said.about(tmp_path, made=tmp_path / "example")
    assert said("latentmill train; make train") == f"latentmill train; make train PROJECT={tmp_path}"
