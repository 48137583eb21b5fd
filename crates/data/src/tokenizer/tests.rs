use super::*;
use crate::ChatTemplate;
use crate::testing::{case, qwen3, shared, tiny};
use temper_config::Template;

#[test]
fn the_real_tokenizer_gives_the_recorded_ids() {
    let (Some(tokenizer), Some(file)) = (qwen3(), shared("tokenizers/qwen3/encode_fixture.json")) else { return };
    let fixtures: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert!(!fixtures.is_empty());
    for f in fixtures {
        let ids: Vec<u32> = f["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let encoded = tokenizer.encode(f["text"].as_str().unwrap()).unwrap();
        assert_eq!(encoded.ids, ids, "{}", f["text"]);
        assert_eq!(encoded.offsets.len(), ids.len());
    }
    assert_eq!(tokenizer.rows(), 151_669);
}

#[test]
fn a_tokenizer_larger_than_the_model_is_refused_with_both_sizes() {
    let added = Tokenizer::load(&case("23-vocabulary-sizes/tok-added")).unwrap();
    let error = added.check_model_rows(320).unwrap_err().to_string();
    assert!(error.contains("323 tokens") && error.contains("only 320 rows"), "{error}");
    assert!(added.check_model_rows(323).is_ok());
    assert_eq!(tiny().rows(), 303);
    assert!(tiny().check_model_rows(320).is_ok());
}

#[test]
fn missing_and_damaged_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("there is no tokenizer.json"), "{error}");
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let error = Tokenizer::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: not a tokenizer"), "{error}");
    let tiny = case("common/tiny-tokenizer");
    std::fs::copy(tiny.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let load = || ChatTemplate::load(&Template::Model, &serde_json::Map::new(), &Tokenizer::load(folder.path()).unwrap());
    let error = load().unwrap_err().to_string();
    assert!(error.contains("no chat template") && error.contains("data.template"), "{error}");
    std::fs::write(folder.path().join("tokenizer_config.json"), "[]").unwrap();
    assert!(Tokenizer::load(folder.path()).unwrap_err().to_string().contains("tokenizer_config.json: not a JSON object"));
}

#[test]
fn templates_come_from_the_file_the_key_or_a_list() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    std::fs::copy(case("common/tiny-tokenizer/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let source = |choice: &Template| {
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        ChatTemplate::load(choice, &serde_json::Map::new(), &tokenizer).map(|t| t.source().to_string()).map_err(|e| e.to_string())
    };
    write("special_tokens_map.json", r#"{"eos_token": "<|endoftext|>", "bos_token": {"content": "<|im_start|>"}}"#);
    write(
        "tokenizer_config.json",
        r#"{"eos_token": "<|im_end|>", "chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
    );
    assert_eq!(source(&Template::Model).unwrap(), "d");
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(
        (tokenizer.token_id("eos_token"), tokenizer.token_id("bos_token"), tokenizer.token_id("pad_token")),
        (Some(302), Some(301), None)
    );
    write("tokenizer_config.json", r#"{"chat_template": "k"}"#);
    assert_eq!(source(&Template::Model).unwrap(), "k");
    write("chat_template.jinja", "f");
    assert_eq!(source(&Template::Model).unwrap(), "f");
    assert_eq!(source(&Template::File(folder.path().join("chat_template.jinja"))).unwrap(), "f");
    assert!(source(&Template::File(folder.path().join("none.jinja"))).unwrap_err().contains("none.jinja"));
    assert!(source(&Template::Named("chatml2".into())).unwrap_err().contains("chatml, qwen3, alpaca or llama3"));
}

#[test]
fn bare_prompts_get_what_the_tokenizer_puts_in_front() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.encode_prompt("Hi").unwrap(), tokenizer.encode("Hi").unwrap().ids);
    let folder = tempfile::tempdir().unwrap();
    let mut json: Value = serde_json::from_slice(&std::fs::read(case("common/tiny-tokenizer/tokenizer.json")).unwrap()).unwrap();
    json["post_processor"] = serde_json::json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [301], "tokens": ["<|im_start|>"]}}});
    json["truncation"] = serde_json::json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let with_bos = Tokenizer::load(folder.path()).unwrap();
    let plain = tokenizer.encode("Hello there").unwrap();
    // Neither the special token nor the truncation touches a text.
    assert_eq!(with_bos.encode("Hello there").unwrap(), plain);
    assert_eq!(with_bos.encode_prompt("Hello there").unwrap(), [vec![301], plain.ids].concat());
}
