"""The experiment about sliders: its project is valid, and its page shows the committed rows."""

from data.research.experiments import slider
from pipeline.project.project import Project


def test_the_project_is_valid_and_draws_no_subject_that_it_trains_on(tmp_path):
    (tmp_path / "project.toml").write_text(slider.PROJECT)
    sections = Project(tmp_path).config.sections
    assert sections["samples"].strengths == tuple(each for each in slider.STRENGTHS if each)
    assert not set(sections["train"].slider.neutral) & set(slider.SUBJECTS)


def test_the_page_shows_the_committed_rows():
    assert slider.table(slider.read_rows(slider.FILE)) in slider.PAGE.read_text()
