//! The command line itself: help, mistakes, and readers that go away.

use crate::support::{Case, command, wait};
use std::process::Stdio;

#[test]
fn every_command_explains_itself() {
    let case = Case::tiny();
    for commands in [
        &[][..],
        &["sft"],
        &["data"],
        &["data", "preview"],
        &["data", "stats"],
        &["data", "build-roleplay"],
        &["checkpoint"],
        &["checkpoint", "list"],
        &["checkpoint", "verify"],
        &["checkpoint", "export"],
        &["generate"],
        &["verify"],
        &["bench"],
        &["bench", "step"],
        &["bench", "ops"],
        &["plan"],
    ] {
        case.temper(&[commands, &["--help"]].concat()).ok().says(&["Usage: temper", "--threads"]);
    }
    case.temper(&["--version"]).ok().says(&["temper "]);
    case.temper(&[]).exits(2).says(&["Usage: temper"]);
    case.temper(&["sft", "config.toml", "--threads", "100000"]).exits(2).says(&["--threads", "1024"]);
    case.temper(&["stf"]).exits(2).says(&["'stf'", "Usage: temper"]);
}

#[test]
fn mistakes_in_the_configuration_are_named_with_their_remedy() {
    let case = Case::tiny();
    for (set, said) in [
        ("optim.lrr=1e-3", "optim.lr"),
        ("train.max_steps=3", "train.steps"),
        ("dta.train=x", "data"),
        ("optim.lr=fast", "number"),
        ("optim.lr=1e30", "from 0 to 10"),
        ("train.micro_batch=3", "train.global_batch"),
        ("parallel.dp=0", "parallel.dp"),
        ("parallel.ep=2", "ep 2 and etp 1 on a dense model"),
        ("data.train=[\"none.jsonl\"]", "none.jsonl"),
        ("model.path=none", "none"),
        ("precision.dtype=bfloat16", "does not compute in bfloat16"),
        ("precision.moments=bfloat16", "precision.moments"),
        ("train.eval_every=2", "data.eval"),
        ("train.aux_loss=hf", "train.aux_loss"),
        ("nonsense", "--set"),
    ] {
        case.sft("config.toml", &[set]).exits(2).says(&[said]);
    }
    case.write("typo.toml", &case.read("config.toml").replace("seq_len", "seqlen"));
    case.sft("typo.toml", &[]).exits(2).says(&["typo.toml:5", "data.seqlen", "data.seq_len"]);
    case.write("broken.toml", "[model\n");
    case.sft("broken.toml", &[]).exits(2).says(&["broken.toml"]);
    let absent = case.sft("absent.toml", &[]).exits(2).says(&["absent.toml", "No such file"]);
    assert_eq!(absent.stderr.matches("No such file").count(), 1, "a cause is told once: {absent:?}");
    assert!(!case.has("run"));
}

/// `temper ... | head -1`: whatever the command, it must end without a panic and without calling it a failure.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let case = Case::tiny();
    case.sft("config.toml", &["train.steps=1"]).ok();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/llama/golden.safetensors");
    let model = golden.trim_end_matches("/golden.safetensors");
    for args in [
        &["sft", "config.toml", "--set", "log.dir=other"][..],
        &["sft", "config.toml", "--set", "log.dir=other", "--set", "log.sample_prompt=Say stop."],
        &["data", "preview", "config.toml"],
        &["data", "preview", "config.toml", "--json"],
        &["data", "preview", "config.toml", "--step", "1"],
        &["data", "stats", "config.toml"],
        &["data", "stats", "config.toml", "--json"],
        &["checkpoint", "list", "run"],
        &["checkpoint", "list", "run", "--json"],
        &["checkpoint", "verify", "run"],
        &["checkpoint", "export", "run", "--out", "out"],
        &["generate", "../common/tiny-qwen3", "--chat", "Say stop."],
        &["generate", "../common/tiny-qwen3", "--chat", "Say stop.", "--json"],
        &["verify", model, "--golden", golden],
        &["verify", model, "--golden", golden, "--json"],
        &["bench", "step", "../common/tiny-qwen3", "--seq", "8", "--steps", "1", "--ops"],
        &["bench", "ops", "../common/tiny-qwen3", "--seq", "8", "--json"],
        &["plan", "config.toml"],
        &["plan", "config.toml", "--json"],
        &["plan", "config.toml", "--explain", "all"],
        &["--help"],
        &["sft", "--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child = command(&case.dir, args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let code = wait(&mut child);
        let mut said = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut said).unwrap();
        assert!(code == Some(0) && !said.contains("panicked"), "{args:?} exits with {code:?}: {said}");
    }
    assert_eq!(case.steps("other").len(), 4, "a run goes on when nobody reads its lines");
}
