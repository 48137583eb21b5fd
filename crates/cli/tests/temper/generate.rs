//! Answers of the tiny model, which has memorised its texts.

use crate::support::{Case, HERE, copy, names};
use std::{fs, path::PathBuf};

/// Sets of JSON files that each turn the tiny model into one with another opinion of its end tokens.
pub fn variants() -> PathBuf {
    PathBuf::from(HERE).join("tests/cases/30-several-eos-ids/variants")
}

#[test]
fn every_end_token_is_honoured_whichever_file_names_it() {
    let case = Case::tiny();
    for name in names(&variants()) {
        copy(&case.path("../common/tiny-qwen3"), &case.path(&name));
        fs::remove_file(case.path(&name).join("generation_config.json")).unwrap();
        copy(&variants().join(&name), &case.path(&name));
        let chat = |text: &str, more: &[&str]| {
            case.temper(&[&["generate", &name, "--chat", text, "--max-tokens", "40", "--temperature", "0"], more].concat()).ok()
        };
        let answer = chat("Say stop.", &["--json"]).json();
        let (text, end) = match name.as_str() {
            "one-in-generation-config" | "none-but-tokenizer" | "eos-outside-vocabulary" => ("stopThe river runs on", 302),
            _ => ("stop", 300),
        };
        assert_eq!(answer["text"], text, "{name}");
        assert_eq!(answer["stopped_by"], end, "{name}");
        assert_eq!(answer["finish_reason"], "stop");
        assert_eq!(answer["ids"].as_array().unwrap().last().unwrap(), end, "{name}");
        assert_eq!(chat("Say stop.", &[]).stdout, format!("{text}\n"));
        match name.as_str() {
            "base-model-eos" => assert_eq!(chat("Count to five.", &[]).stdout, "one two three four five\n"),
            "one-in-generation-config" => assert_eq!(chat("Say stop.", &["--special"]).stdout, "stop<|endoftext|>The river runs on\n"),
            "eos-outside-vocabulary" => drop(chat("Say stop.", &[]).says(&["99999"])),
            _ => (),
        }
    }
}

const MODEL: &str = "../common/tiny-qwen3";

#[test]
fn a_prompt_is_continued_and_a_stop_text_cuts() {
    let case = Case::tiny();
    let chat = |more: &[&str]| case.temper(&[&["generate", MODEL, "--chat", "Count to five."], more].concat()).ok();
    assert_eq!(chat(&[]).stdout, "one two three four five\n");
    assert_eq!(chat(&["--stop", " four"]).stdout, "one two three\n");
    assert_eq!(chat(&["--stop", "nothing", "--stop", "e f"]).stdout, "one two thre\n");
    let cut = chat(&["--stop", " four", "--json"]).json();
    assert_eq!((&cut["text"], &cut["stopped_by"]), (&"one two three".into(), &" four".into()));
    assert_eq!(chat(&["--max-tokens", "1", "--json"]).json()["finish_reason"], "length");

    // The same question spelt out in the model's own template.
    let prompt = "<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n";
    let spelt = case.temper(&["generate", MODEL, "--prompt", prompt, "--json"]).ok().json();
    assert_eq!(spelt["text"], "one two three four five");
    assert_eq!(spelt["prompt_tokens"], chat(&["--json"]).json()["prompt_tokens"]);
    assert_eq!(spelt["ids"].as_array().unwrap().len(), spelt["new_tokens"].as_u64().unwrap() as usize);
    assert_eq!(spelt["log_probs"].as_array().unwrap().len(), spelt["ids"].as_array().unwrap().len());
}

#[test]
fn sampling_repeats_with_its_seed() {
    let case = Case::tiny();
    let sample = |seed: &str| {
        let args = ["generate", MODEL, "--prompt", "river", "--temperature", "2.5", "--max-tokens", "24", "--seed", seed, "--json"];
        case.temper(&args).ok().json()["ids"].clone()
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
    let one =
        |more: &[&str]| case.temper(&[&["generate", MODEL, "--chat", "Count to five.", "--temperature", "3"], more].concat()).ok().stdout;
    assert_eq!(one(&["--top-k", "1"]), "one two three four five\n");
    assert_eq!(one(&["--top-p", "0.01"]), "one two three four five\n");
}

#[test]
fn impossible_requests_are_refused() {
    let case = Case::tiny();
    let generate = |args: &[&str]| case.temper(&[&["generate"], args].concat());
    generate(&[MODEL]).exits(2).says(&["--prompt", "--chat"]);
    generate(&[MODEL, "--prompt", "a", "--chat", "b"]).exits(2);
    generate(&[MODEL, "--prompt", "a", "--temperature=-1"]).exits(2).says(&["temperature"]);
    generate(&[MODEL, "--prompt", "a", "--top-p", "0"]).exits(2).says(&["top"]);
    generate(&["nowhere", "--prompt", "a"]).exits(2).says(&["nowhere"]);
    generate(&[MODEL, "--prompt", ""]).exits(2).says(&["prompt"]);
    generate(&[MODEL, "--prompt", &"river ".repeat(2000)]).exits(2);
    copy(&case.path(MODEL), &case.path("broken"));
    for text in ["{", "{\"eos_token_id\": \"stop\"}"] {
        case.write("broken/generation_config.json", text);
        generate(&["broken", "--prompt", "a"]).exits(2).says(&["generation_config.json"]);
    }
}
