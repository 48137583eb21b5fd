use super::*;
use serde_json::json;

const VOCAB: usize = 320;

/// `<|endoftext|>` 300, `<|im_start|>` 301, `<|im_end|>` 302.
fn token_id(text: &str) -> Option<u32> {
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].iter().position(|t| *t == text).map(|i| 300 + i as u32)
}

struct Row {
    name: &'static str,
    generation_config: Value,
    config: Value,
    tokenizer_config: Value,
    /// Ids for plain continuation and for chat.
    plain: &'static [u32],
    chat: &'static [u32],
    notices: usize,
}

fn rows() -> Vec<Row> {
    let tokenizer = || json!({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"});
    let row = |name, generation_config, config, plain, chat, notices| Row {
        name,
        generation_config,
        config,
        tokenizer_config: tokenizer(),
        plain,
        chat,
        notices,
    };
    let eos = |ids: Value| json!({"eos_token_id": ids});
    vec![
        row("list-in-generation-config", eos(json!([302, 300])), eos(json!(302)), &[302, 300], &[302, 300], 0),
        row("list-in-config-only", Value::Null, eos(json!([302, 300])), &[302, 300], &[302, 300], 0),
        row("one-in-generation-config", eos(json!(302)), eos(json!(302)), &[302], &[302], 0),
        row("generation config wins over config", eos(json!(300)), eos(json!(302)), &[300], &[300, 302], 0),
        row("none-but-tokenizer", Value::Null, eos(Value::Null), &[302], &[302], 0),
        row("base-model-eos", Value::Null, eos(json!(300)), &[300], &[300, 302], 0),
        row("eos-outside-vocabulary", eos(json!([302, 99999])), eos(json!(302)), &[302], &[302], 1),
        row("only ids outside the vocabulary", eos(json!([99999])), eos(json!(300)), &[300], &[300, 302], 1),
        row("id past 32 bits", eos(json!(4294967598u64)), json!({}), &[302], &[302], 1),
        row("empty list, repeats", eos(json!([])), eos(json!([300, 300])), &[300], &[300, 302], 0),
        Row {
            tokenizer_config: json!({"eos_token": {"content": "<|im_end|>", "lstrip": false}}),
            ..row("eos_token as an object", Value::Null, json!({}), &[302], &[302], 0)
        },
        Row { tokenizer_config: json!({"eos_token": "</s>"}), ..row("unknown eos_token", Value::Null, json!({}), &[], &[302], 1) },
        Row { tokenizer_config: json!({}), ..row("nowhere", Value::Null, json!({}), &[], &[302], 0) },
    ]
}

#[test]
fn every_variant_of_where_end_tokens_are_named() {
    for r in rows() {
        let some = |v| if v == &Value::Null { None } else { Some(v) };
        let files = EndTokenFiles {
            generation_config: some(&r.generation_config),
            config: some(&r.config),
            tokenizer_config: some(&r.tokenizer_config),
        };
        let plain = end_tokens(files, &token_id, None, VOCAB).unwrap();
        let chat = end_tokens(files, &token_id, Some("<|im_end|>\n"), VOCAB).unwrap();
        assert_eq!(plain.ids, r.plain, "{}", r.name);
        assert_eq!(chat.ids, r.chat, "{}", r.name);
        assert_eq!(chat.notices.len(), r.notices, "{}: {:?}", r.name, chat.notices);
        assert_eq!(plain.ids.is_empty(), plain.notices.iter().any(|n| n.contains("names no end token")), "{}", r.name);
    }
}

#[test]
fn a_turn_end_of_several_tokens_adds_nothing() {
    let config = json!({"eos_token_id": 300});
    let files = EndTokenFiles { config: Some(&config), ..EndTokenFiles::default() };
    assert_eq!(end_tokens(files, &token_id, Some("### End"), VOCAB).unwrap().ids, [300]);
}

#[test]
fn malformed_values_name_file_and_key() {
    for (bad, shown) in [(json!("<|im_end|>"), "<|im_end|>"), (json!(-1), "-1"), (json!([302, 1.5]), "1.5"), (json!({}), "{}")] {
        let json = json!({"eos_token_id": bad});
        let files = EndTokenFiles { generation_config: Some(&json), ..EndTokenFiles::default() };
        let message = end_tokens(files, &token_id, None, VOCAB).unwrap_err().to_string();
        assert!(message.contains("generation_config.json: eos_token_id holds") && message.contains(shown), "{message}");
    }
    let json = json!({"eos_token": 5});
    let files = EndTokenFiles { tokenizer_config: Some(&json), ..EndTokenFiles::default() };
    assert!(end_tokens(files, &token_id, None, VOCAB).unwrap_err().to_string().contains("eos_token is 5"));
}

#[test]
fn reads_a_folder_and_names_the_broken_file() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("config.json", r#"{"eos_token_id": 302}"#);
    assert_eq!(end_tokens_in(dir.path(), &token_id, None, VOCAB).unwrap().ids, [302]);
    write("generation_config.json", r#"{"eos_token_id": [300"#);
    let message = end_tokens_in(dir.path(), &token_id, None, VOCAB).unwrap_err().to_string();
    assert!(message.contains(dir.path().join("generation_config.json").to_str().unwrap()) && message.contains("no JSON"), "{message}");
    write("generation_config.json", r#"{"eos_token_id": "x"}"#);
    let message = end_tokens_in(dir.path(), &token_id, None, VOCAB).unwrap_err().to_string();
    assert!(message.contains(dir.path().to_str().unwrap()), "{message}");
}
