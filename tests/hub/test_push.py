"""`hybridize push` against a Hub on the loopback interface, through the real client library."""

import json
import shutil

import pytest
from hub_double import HANG_UP, LARGE, Commit, Refusal, Repository

import hybridize
from hybridize.workspace import Workspace

NAME = "me/hybrid"


def on_disk(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_arrives_is_what_is_there_in_one_commit(hub, push, folder):
    code, report, err = push(folder, NAME)
    assert code == 0, err
    assert hub.head(NAME).files == on_disk(folder)
    assert len(hub.repositories[NAME].branches["main"]) == 2 and not hub.repositories[NAME].private
    assert report["commit"] == hub.head(NAME).oid and report["url"] == f"{hub.endpoint}/{NAME}"
    assert hub.sent("PUT /part/") and hub.sent("PUT /large/")  # in several parts, and in one
    first = min(i for i, line in enumerate(hub.requests) if line.startswith("PUT"))
    assert all("commit" not in line for line in hub.requests[:first])
    assert "is sound: pushing" in err and "hf_write" not in err + json.dumps(report)
    assert "# hybrid\n" in (folder / "README.md").read_text()


def test_a_second_push_sends_what_changed_and_removes_old_weights(hub, push, folder, place, tmp_path):
    assert push(folder, NAME)[0] == 0
    uploads = len(hub.sent("^PUT"))
    code, report, err = push(folder, NAME)
    assert code == 0 and report["unchanged"] and len(hub.sent("^PUT")) == uploads, err
    assert len(hub.repositories[NAME].branches["main"]) == 2
    hub.head(NAME).files["picture.png"] = b"theirs"
    whole = shutil.copytree(place / "hybrid", tmp_path / "whole")
    code, report, err = push(whole, NAME, "-m", "One file")
    assert code == 0, err
    assert report["removed"] == sorted(n for n in on_disk(folder) if n.startswith(("model-", "model.")))
    assert hub.head(NAME).message == "One file"
    assert hub.head(NAME).files == {**on_disk(whole), "picture.png": b"theirs"}


def test_a_push_that_broke_off_sends_only_what_is_missing(hub, push, folder):
    hub.refusals = [Refusal("^PUT /(large|part)/", HANG_UP, skip=4)]
    code, report, err = push(folder, NAME)
    assert code == 1 and report is None and "broke off" in err and "again" in err
    assert hub.head(NAME).files == {}  # never half a model
    arrived, asked = set(hub.large), len(hub.requests)
    assert arrived
    hub.refusals = []
    code, _, err = push(folder, NAME)
    assert code == 0, err
    assert hub.head(NAME).files == on_disk(folder)
    assert not any(oid in line for oid in arrived for line in hub.requests[asked:] if line.startswith("PUT"))


def test_a_connection_that_fails_now_and_then_is_tried_again(hub, push, folder):
    hub.refusals = [Refusal("^PUT", HANG_UP, times=1, skip=1), Refusal("preupload", 503, times=1)]
    code, _, err = push(folder, NAME)
    assert code == 0 and hub.head(NAME).files == on_disk(folder), err


def test_a_branch_and_a_private_repository(hub, push, folder):
    code, _, err = push(folder, NAME, "--private", "--revision", "try/one")
    assert code == 0, err
    assert hub.repositories[NAME].private
    assert hub.head(NAME).files == {} and hub.head(NAME, "try/one").files == on_disk(folder)


def test_a_pull_request_on_a_repository_of_others(hub, push, folder):
    hub.repositories["them/model"] = Repository()
    code, report, err = push(folder, "them/model", "--create-pr")
    assert code == 0, err
    assert report["pull_request"] == f"{hub.endpoint}/them/model/discussions/1"
    assert hub.head("them/model").files == {}
    assert hub.head("them/model", "refs/pr/1").files == on_disk(folder)


def test_without_names(hub, push, folder, tmp_path, place, monkeypatch):
    code, _, err = push(tmp_path / "hybrid")
    assert code == 2 and "give one, or --yes" in err and not hub.requests
    code, _, err = push("--yes")
    assert code == 2 and "holds no hybrid" in err
    Workspace(tmp_path / "runs").record("hybrid", folder)
    code, report, err = push("--yes")
    assert code == 0 and f"taking {folder}" in err
    assert report["repository"] == "me/source-gdn-gka-mamba2-75" and "me/source-gdn-gka-mamba2-75" in hub.repositories
    code, report, err = push("other")  # one argument that is no folder
    assert code == 0 and report["repository"] == "me/other", err
    with pytest.raises(hybridize.errors.UsageError, match="give another REPO"):
        hybridize.push(folder, confirm=lambda question: "me/source-gdn" not in question, workspace=tmp_path / "runs")


def test_what_does_not_belong_stays_here(hub, push, folder):
    extra = {".cache/x": False, "a.tmp": False, "b.lock": False, "images/a.png": True, "notes.txt": True}
    for name in extra:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    code, report, err = push(folder, NAME)
    assert code == 0, err
    assert {name: name in hub.head(NAME).files for name in extra} == extra
    assert report["left_out"] == [".cache/x", "a.tmp", "b.lock"] and "Left out" in err


def test_dry_run_needs_no_hub_and_writes_nothing(push, folder):
    before = on_disk(folder)
    code, report, err = push(folder, "--dry-run")
    assert code == 0 and report["findings"] == [] and report["checksums"] and report["generation_tried"], err
    assert report["repository"] == "USER/source-gdn-gka-mamba2-75" and report["card"].startswith("---\n")
    assert report["bytes"] == sum(map(len, before.values())) and on_disk(folder) == before
    (folder / "tokenizer.json").write_text("{}")
    code, report, err = push(folder, "--dry-run")
    assert code == 1 and {found["file"] for found in report["findings"]} == {"tokenizer.json"}


def test_findings_are_listed_before_anything_is_sent(hub, push, folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.safetensors").write_bytes(b"")
    code, report, err = push(folder, NAME)
    assert code == 1 and report is None and "Nothing was pushed: 3 things are wrong" in err
    assert "  tokenizer.json: is not what prime wrote" in err and "  old.safetensors: holds weights" in err
    assert hub.requests == ["GET /api/whoami-v2"] and not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (Refusal("whoami", 401, {"X-Error-Message": "Invalid credentials in Authorization header"}), "hf auth login"),
        (Refusal("repos/create", 403, {"X-Error-Message": "No rights"}), "may not write to me/hybrid (403: No rights)"),
        (Refusal("preupload", 403, {"X-Error-Message": "Private storage limit"}), "storage limit is reached"),
        (Refusal("preupload", 404, {"X-Error-Code": "RepoNotFound"}), "has no repository me/hybrid"),
        (Refusal("objects/batch", 413), "too large (413"),
        (Refusal("preupload", 429, {"Retry-After": "0"}), "limiting requests (429"),
        (Refusal("commit", 409), "changed while this was being pushed (409"),
        (Refusal("commit", 412, {"X-Error-Message": "A commit has happened since"}), "(412: A commit has happened"),
        (Refusal("commit", 502), "trouble of its own (502)"),
        (Refusal("validate-yaml", 400), "me/hybrid"),
        (Refusal("commit", HANG_UP), "broke off"),
        (Refusal("whoami", HANG_UP), "broke off"),
    ],
    ids=lambda value: f"{value.pattern} {value.status}".replace("/", "-") if isinstance(value, Refusal) else "",
)
def test_every_refusal_is_one_sentence(hub, push, folder, untried, refusal, said):
    hub.refusals = [refusal]
    code, report, err = push(folder, NAME)
    assert code == 1 and report is None
    assert said in err and "Traceback" not in err and "hf_write" not in err
    assert len([line for line in err.splitlines() if line.startswith("Error: ")]) == 1, err
    assert NAME not in hub.repositories or hub.head(NAME).files == {}


def test_a_commit_in_between_is_not_overwritten(hub, push, folder):
    hub.repositories[NAME] = Repository()
    branch = hub.repositories[NAME].branches["main"]

    def between(request):
        if request.startswith("PUT") and len(branch) == 1:
            branch.append(Commit("theirs", {"a": b"b"}, 1))

    hub.watch = between
    code, _, err = push(folder, NAME)
    assert code == 1 and "changed while this was being pushed (412" in err
    assert hub.head(NAME).message == "theirs"


@pytest.mark.parametrize(
    ("token", "said"), [(None, "No access token was found"), ("hf_read", "may only read"), ("hf_old", "refused")]
)
def test_tokens(hub, push, folder, untried, monkeypatch, token, said):
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    code, _, err = push(folder, NAME)
    assert code == 1 and said in err and "hf auth login" in err and str(token) not in err.replace("HF_TOKEN", "")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["me/bad..name"], 2, "no name for a repository"),
        (["a/b/c"], 2, "no name for a repository"),
        ([NAME, "--create-pr", "--revision", "dev"], 2, "leave --create-pr or --revision out"),
        ([NAME, "--create-pr"], 1, "leave --create-pr out to make it"),
        (["them/theirs"], 1, "may not write to them/theirs (403"),
        (["me/public", "--private"], 1, "exists and is public"),
        ([NAME, "--card", "mine"], 2, "none of keep, overwrite"),
        ([""], 2, "nothing was given"),
    ],
)
def test_bad_input(hub, push, folder, untried, arguments, code, said):
    hub.repositories["me/public"] = Repository()
    got, report, err = push(folder, *arguments)
    assert (got, report) == (code, None) and said in err, err
    assert NAME not in hub.repositories and hub.head("me/public").files == {}


@pytest.mark.parametrize("name", ["nowhere/at/all/there", "./nowhere", "source"])
def test_what_is_no_hybrid(hub, push, place, name, monkeypatch):
    monkeypatch.chdir(place)
    code, report, err = push(name, NAME)
    assert code in (1, 2) and report is None
    assert "no folder" in err or "is not a hybrid's" in err


def test_the_double_calls_some_files_large(place):
    sizes = [path.stat().st_size for path in (place / "sharded").glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) > 2 * 16_384 and min(sizes) >= LARGE
