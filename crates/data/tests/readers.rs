//! Files to conversations: the reported faults of other tools (tests/cases), containers, row formats, bad rows.

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use temper_data::{BadRow, Conversation, Error, Role, RowFormat, SourceReport, read_source};

type Rows = Vec<Result<Conversation, BadRow>>;

fn read(path: &Path) -> Result<(Rows, SourceReport), Error> {
    let mut rows = Vec::new();
    let report = read_source(7, path, &mut |row| {
        rows.push(row);
        ControlFlow::Continue(())
    })?;
    assert_eq!(report.rows, rows.len() as u64);
    assert_eq!(report.bad_rows, rows.iter().filter(|row| row.is_err()).count() as u64);
    Ok((rows, report))
}

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(name)
}

fn read_case(name: &str) -> (Rows, SourceReport) {
    read(&case(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Writes `bytes` to a file of that name and reads it.
fn read_bytes(name: &str, bytes: &[u8]) -> Result<(Rows, SourceReport), Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    read(&path)
}

fn read_text(text: &str) -> Rows {
    read_bytes("data.jsonl", text.as_bytes()).unwrap().0
}

/// The one conversation of a one-row file.
fn one(row: Value) -> Conversation {
    read_text(&row.to_string()).remove(0).unwrap_or_else(|bad| panic!("{bad}"))
}

/// Why the one row of a file is bad.
fn reason(row: Value) -> String {
    read_text(&row.to_string()).remove(0).expect_err("the row must be bad").reason
}

fn error(name: &str, bytes: &[u8]) -> String {
    read_bytes(name, bytes).expect_err("the file must be refused").to_string()
}

fn kept(rows: &Rows) -> Vec<u64> {
    rows.iter().flatten().map(|conversation| conversation.id.row).collect()
}

fn bad(rows: &Rows) -> Vec<u64> {
    rows.iter().filter_map(|row| row.as_ref().err()).map(|bad| bad.row).collect()
}

fn turns(conversation: &Conversation) -> Vec<(&str, &str)> {
    conversation.messages.iter().map(|message| (message.role.name(), message.content.as_str())).collect()
}

/// Role and body of every ChatML turn of a rendered sample, the thinking block that Qwen3's template adds removed.
fn chatml(sample: &Value) -> Vec<(String, String)> {
    let text = sample["text"].as_str().unwrap();
    let turns = text.split("<|im_start|>").skip(1).map(|turn| {
        let (role, body) = turn.split_once('\n').unwrap();
        let body = body.strip_suffix("<|im_end|>\n").unwrap();
        (role.to_owned(), body.strip_prefix("<think>\n\n</think>\n\n").unwrap_or(body).to_owned())
    });
    turns.collect()
}

fn expected(name: &str) -> Value {
    serde_json::from_slice(&fs::read(case(name)).unwrap()).unwrap()
}

fn assert_renders(rows: &Rows, samples: &Value) {
    let rows: Vec<&Conversation> = rows.iter().flatten().collect();
    let samples = samples.as_array().unwrap();
    assert_eq!(rows.len(), samples.len());
    for (row, sample) in rows.iter().zip(samples) {
        let found: Vec<(String, String)> = turns(row).into_iter().map(|(role, text)| (role.to_owned(), text.to_owned())).collect();
        assert_eq!(found, chatml(sample));
    }
}

#[test]
fn tool_arguments_keep_exactly_their_keys_and_nulls() {
    let (rows, _) = read_case("03-tool-arguments-null/data.jsonl");
    let arguments: Vec<String> = rows
        .iter()
        .flatten()
        .flat_map(|row| row.messages.iter().filter_map(|message| message.fields.get("tool_calls")))
        .flat_map(|calls| calls.as_array().unwrap().iter().map(|call| call["function"]["arguments"].to_string()))
        .collect();
    let right = [
        r#"{"angle":30,"speed":1}"#,
        r#"{"text":"hi","volume":null}"#,
        r#"{"speed":2}"#,
        r#"{"text":"go"}"#,
        r#""{\"angle\": 7,  \"speed\":8}""#,
    ];
    assert_eq!(arguments, right);
    assert!(rows.iter().flatten().all(|row| row.tools.as_ref().unwrap().as_array().unwrap().len() == 2));
}

#[test]
fn null_content_beside_tool_calls_is_an_empty_text_that_is_kept() {
    let (rows, _) = read_case("05-null-content-tool-turns/data.jsonl");
    assert_eq!(kept(&rows), [1, 2]);
    for row in rows.iter().flatten() {
        assert_eq!((row.messages[1].role, row.messages[1].content.as_str()), (Role::Assistant, ""));
        assert_eq!(row.messages[1].fields["content"], "");
        assert!(row.messages[1].fields["tool_calls"].is_array());
    }
}

#[test]
fn text_parts_are_joined_and_other_parts_refused_by_name() {
    let (rows, _) = read_case("11-content-as-parts/data.jsonl");
    assert_eq!((kept(&rows), bad(&rows)), (vec![1, 2, 3], vec![4, 5]));
    assert_renders(&rows, &expected("11-content-as-parts/expected.json")["samples"]);
    let image = rows[3].as_ref().unwrap_err().to_string();
    assert!(
        image.ends_with("data.jsonl:4: turn 1: `content` part 1 is of type `image`; only text can be trained: remove the part or the row"),
        "{image}"
    );
    assert!(reason(json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]})).contains("part 1 has no text"));
}

#[test]
fn any_order_of_roles_is_kept_and_unknown_roles_are_named() {
    let right = expected("13-role-order-and-names/expected.json");
    let (rows, _) = read_case("13-role-order-and-names/data.jsonl");
    assert_eq!(bad(&rows), [5, 6, 7, 8, 9]);
    assert_renders(&rows, &right["samples"]);
    let reasons: Vec<&str> = rows.iter().filter_map(|row| row.as_ref().err()).map(|bad| bad.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "no assistant turn: nothing to train",
            "turn 2: unknown role `bot`; allowed: system, user, assistant, tool, developer",
            "turn 2: unknown role `Assistant`; allowed: system, user, assistant, tool, developer",
            "turn 2: `role` is missing (keys found: content)",
            "turn 2: `content` is missing (keys found: role, text)",
        ]
    );

    let (rows, report) = read_case("13-role-order-and-names/sharegpt.jsonl");
    assert_eq!((kept(&rows), bad(&rows), report.format), (vec![1, 2, 3, 5], vec![4], Some(RowFormat::Sharegpt)));
    assert_renders(&rows, &right["sharegpt"]["samples"]);
    assert!(rows[3].as_ref().unwrap_err().reason.starts_with("turn 2: unknown role `bard`; allowed: system, user, assistant, tool"));
}

#[test]
fn encodings_and_line_ends() {
    let right = expected("15-bom-crlf-separators/expected.json");
    for name in right["good_files"].as_array().unwrap() {
        let name = name.as_str().unwrap();
        let (rows, _) = read_case(&format!("15-bom-crlf-separators/{name}"));
        assert_renders(&rows, &right["samples"]);
    }
    let (rows, report) = read_case("15-bom-crlf-separators/blank-lines.jsonl");
    let text = fs::read_to_string(case("15-bom-crlf-separators/blank-lines.jsonl")).unwrap();
    let lines: Vec<u64> = (1..).zip(text.split('\n')).filter(|(_, line)| line.contains('{')).map(|(at, _)| at).collect();
    assert_eq!(kept(&rows), lines, "rows are physical lines");
    assert_eq!(report.blank_lines, text.matches('\n').count() as u64 - 2);

    let utf16 = read(&case("15-bom-crlf-separators/utf16.jsonl")).unwrap_err().to_string();
    assert!(utf16.contains("utf16.jsonl: UTF-16") && utf16.contains("iconv -f UTF-16"), "{utf16}");
    let unmarked: Vec<u8> = "{\"messages\": []}".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert!(error("data.jsonl", &unmarked).contains("UTF-16"));

    let (rows, _) = read_case("15-bom-crlf-separators/latin1.jsonl");
    let bytes = fs::read(case("15-bom-crlf-separators/latin1.jsonl")).unwrap();
    let at = std::str::from_utf8(&bytes).unwrap_err().valid_up_to();
    let bad = rows[1].as_ref().unwrap_err();
    assert_eq!((kept(&rows), bad.row), (vec![1], 2));
    assert!(bad.reason.contains(&format!("invalid UTF-8: byte 0x{:02X} at byte offset {at} of the file", bytes[at])), "{bad}");
    let line_start = bytes[..at].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
    assert_eq!(bad.column, Some((at - line_start) as u64 + 1));
}

#[test]
fn broken_json_keeps_the_good_rows_and_names_the_others() {
    let right = expected("17-broken-json/expected.json");
    for (name, right) in right["files"].as_object().unwrap() {
        let (rows, _) = read_case(&format!("17-broken-json/{name}"));
        let list = |keys: &[&str]| {
            keys.iter().find_map(|key| right.get(*key)).map(|list| serde_json::from_value::<Vec<u64>>(list.clone()).unwrap())
        };
        match list(&["kept"]) {
            Some(right) => assert_eq!(kept(&rows), right, "{name}"),
            None => assert_eq!(kept(&rows).len() as u64, right["kept_objects"], "{name}"),
        }
        let refused = list(&["bad", "bad_or_last_wins_but_counted", "bad_or_kept_but_counted"]).unwrap_or_default();
        assert_eq!(bad(&rows), refused, "{name}");
        for bad in rows.iter().filter_map(|row| row.as_ref().err()) {
            assert!(bad.column.is_some() && bad.to_string().contains(&format!("{name}:{}:", bad.row)), "{bad}");
            if let Some(say) = right.get("say") {
                assert!(bad.reason.contains(say.as_str().unwrap()), "{bad}");
            }
        }
    }
}

#[test]
fn the_reasons_of_broken_json() {
    let good = r#"{"messages": [{"role": "assistant", "content": "a"}]}"#;
    let cases = [
        (format!("{good},"), "a comma after the value"),
        (format!("{good} {good}"), "a second value after the first"),
        (format!("{good} x"), "text after the value"),
        (r#"{"a": 1,}"#.to_owned(), "trailing comma"),
        (r#"{"a": NaN}"#.to_owned(), "NaN is not JSON"),
        (r#"{"a": -Infinity}"#.to_owned(), "Infinity is not JSON"),
        (r#"{"a": None}"#.to_owned(), "None is Python"),
        (r#"{"a": True}"#.to_owned(), "True is Python"),
        (r#"{'a': 1}"#.to_owned(), "single quotes"),
        (r#"{"a": 1e999}"#.to_owned(), "number out of range"),
        (r#"{"a": {"b": 1, "b": 2}}"#.to_owned(), "the key `b` is given twice"),
        (r#"{"a": [{"b": 1, "\u0062": 2}]}"#.to_owned(), "the key `b` is given twice"),
        (r#"{"a": "\ud800"}"#.to_owned(), "hex escape"),
        ("{\"a\": \"\u{1}\"}".to_owned(), "raw control character"),
        ("[".repeat(100_000), "nested more than 128 levels"),
        ("{\"a\":".repeat(100_000), "nested more than 128 levels"),
        (r#"{"a": "#.to_owned(), "end of line inside a value"),
        ("3".to_owned(), "a number where a row is expected"),
    ];
    for (line, why) in cases {
        let rows = read_text(&format!("{good}\n{line}\n{good}\n"));
        assert_eq!((kept(&rows), bad(&rows)), (vec![1, 3], vec![2]), "{why}");
        let found = &rows[1].as_ref().unwrap_err().reason;
        assert!(found.contains(why), "{why}: {found}");
    }
}

#[test]
fn numbers_that_would_be_rounded_are_refused_where_they_are_trained() {
    let row = |number: &str| {
        format!(
            r#"{{"big": {number}, "messages": [{{"role": "assistant", "content": "", "tool_calls": [{{"name": "f", "arguments": {{"n": {number}}}}}]}}]}}"#
        )
    };
    let exact = read_text(&row("18446744073709551615"));
    assert_eq!(exact[0].as_ref().unwrap().messages[0].fields["tool_calls"][0]["arguments"]["n"], u64::MAX);
    let rounded = read_text(&row("123456789012345678901234567890"));
    assert!(rounded[0].as_ref().unwrap_err().reason.contains("cannot be kept to the digit"));
    let ignored = r#"{"big": 123456789012345678901234567890, "messages": [{"role": "assistant", "content": "a"}]}"#;
    assert_eq!(kept(&read_text(ignored)), [1]);
}

#[test]
fn loss_and_weight_of_a_turn() {
    let loss = |value: Value| {
        let row = json!({"messages": [{"loss": value, "role": "assistant", "name": "x", "content": "a", "z": null}]});
        let message = one(row).messages.remove(0);
        assert_eq!(message.fields.keys().collect::<Vec<_>>(), ["role", "name", "content", "z"], "order kept, switch removed");
        message.loss
    };
    assert_eq!(loss(json!(false)), Some(0.0));
    assert_eq!(loss(json!(true)), Some(1.0));
    assert_eq!(loss(json!(0)), Some(0.0));
    assert_eq!(loss(json!(0.25)), Some(0.25));
    assert_eq!(loss(json!(null)), None);
    let weight = one(json!({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}));
    assert_eq!((weight.messages[0].loss, weight.messages[0].fields.len()), (Some(0.0), 2));
    for wrong in [json!(1.5), json!(-0.1), json!("no")] {
        assert!(reason(json!({"messages": [{"role": "assistant", "content": "a", "loss": wrong}]})).contains("`loss` is"));
    }
    let both = json!({"messages": [{"role": "assistant", "content": "a", "loss": 1, "weight": 0}]});
    assert!(reason(both).contains("both `loss` and `weight`"));
}

#[test]
fn empty_assistant_turns_are_refused_unless_masked() {
    let row = |turn: Value| json!({"messages": [turn, {"role": "assistant", "content": "end"}]});
    assert!(reason(row(json!({"role": "assistant", "content": " \n"}))).contains("answer nothing"));
    assert!(reason(row(json!({"role": "assistant", "content": null}))).contains("`content` is null"));
    assert!(reason(row(json!({"role": "assistant", "content": "", "tool_calls": []}))).contains("answer nothing"));
    assert!(reason(row(json!({"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}))).contains("no function name"));
    assert!(reason(row(json!({"role": "assistant", "content": "", "tool_calls": {"name": "f"}}))).contains("must be a list"));
    assert_eq!(turns(&one(row(json!({"role": "assistant", "content": "", "loss": 0})))), [("assistant", ""), ("assistant", "end")]);
    assert_eq!(turns(&one(row(json!({"role": "user", "content": ""})))), [("user", ""), ("assistant", "end")]);
    assert!(reason(row(json!({"role": "tool", "content": {"a": 1}}))).contains("`content` is an object"));
}

#[test]
fn system_texts_beside_the_turns() {
    let row = |system: &str, first: Value| json!({"system": system, "messages": [first, {"role": "assistant", "content": "a"}]});
    let user = json!({"role": "user", "content": "u"});
    assert_eq!(turns(&one(row("S", user.clone()))), [("system", "S"), ("user", "u"), ("assistant", "a")]);
    assert_eq!(turns(&one(row("", user))), [("user", "u"), ("assistant", "a")]);
    assert_eq!(turns(&one(row("S", json!({"role": "developer", "content": "S"})))), [("system", "S"), ("assistant", "a")]);
    assert!(reason(row("S", json!({"role": "system", "content": "T"}))).contains("two different system texts"));
}

#[test]
fn sharegpt_tools_and_function_calls() {
    let row = json!({
        "tools": "[{\"name\": \"f\"}]",
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": null}}"},
            {"from": "observation", "value": "r"},
            {"from": "gpt", "value": "a", "loss": false},
        ]
    });
    let row = one(row);
    assert_eq!(turns(&row), [("user", "q"), ("assistant", ""), ("tool", "r"), ("assistant", "a")]);
    assert_eq!(row.tools, Some(json!([{"name": "f"}])));
    assert_eq!(row.messages[3].loss, Some(0.0));
    let call =
        r#"{"role":"assistant","content":"","tool_calls":[{"type":"function","function":{"name":"f","arguments":{"b":1,"a":null}}}]}"#;
    assert_eq!(Value::Object(row.messages[1].fields.clone()).to_string(), call);
    let broken = json!({"conversations": [{"from": "function_call", "value": "f(1)"}]});
    assert!(reason(broken).contains("the function call is not JSON"));
}

#[test]
fn alpaca_and_prompt_rows() {
    let rows = [
        (json!({"instruction": "i", "input": "x", "output": "o"}), vec![("user", "i\nx"), ("assistant", "o")]),
        (json!({"instruction": "i", "input": "", "output": "o"}), vec![("user", "i"), ("assistant", "o")]),
        (json!({"instruction": "i", "output": "o", "system": "s"}), vec![("system", "s"), ("user", "i"), ("assistant", "o")]),
        (
            json!({"instruction": "i", "output": "o", "history": [["q", "r"]]}),
            vec![("user", "q"), ("assistant", "r"), ("user", "i"), ("assistant", "o")],
        ),
        (json!({"prompt": "p", "response": "r"}), vec![("user", "p"), ("assistant", "r")]),
        (
            json!({"prompt": [{"role": "user", "content": "p"}], "completion": [{"role": "assistant", "content": "c"}]}),
            vec![("user", "p"), ("assistant", "c")],
        ),
    ];
    for (row, right) in rows {
        assert_eq!(turns(&one(row)), right);
    }
    assert!(reason(json!({"instruction": "i", "output": ""})).contains("`output` is empty"));
    assert!(reason(json!({"instruction": "", "input": "", "output": "o"})).contains("both empty"));
    assert!(reason(json!({"instruction": "i", "output": 3})).contains("`output` is a number"));
    assert!(reason(json!({"instruction": "i", "output": "o", "history": [["q"]]})).contains("entry 1"));
    let context = one(json!({"prompt": [{"role": "assistant", "content": "p"}], "completion": "c"}));
    assert_eq!((context.messages[0].loss, context.messages[1].loss), (Some(0.0), None));
}

#[test]
fn the_format_is_found_once_and_unknown_keys_are_named() {
    let rows = read_text("{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n{\"instruction\": \"i\", \"output\": \"o\"}\n");
    let second = &rows[1].as_ref().unwrap_err().reason;
    assert!(second.contains("`messages` is missing") && second.contains("instruction, output"), "{second}");
    let unknown = error("data.jsonl", b"{\"question\": 1, \"answer\": 2}\n");
    assert!(unknown.contains("found: question, answer") && unknown.contains("`messages`"), "{unknown}");
}

#[test]
fn containers_by_name_and_content() {
    let row = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n";
    let text = row.repeat(3);
    let gzip = |text: &str| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let zst = |text: &str| zstd::encode_all(text.as_bytes(), 1).unwrap();
    let array = format!("[{}]", row.repeat(3).trim_end().replace('\n', ",\n"));
    let two_members = [gzip(row), gzip(row), gzip(row)].concat();
    for (name, bytes) in [
        ("a.jsonl", text.clone().into_bytes()),
        ("a.JSONL.GZ", gzip(&text)),
        ("a.jsonl.gz", two_members.clone()),
        ("a.ndjson.zst", zst(&text)),
        ("a.jsonl.zst", [zst(row), zst(&row.repeat(2))].concat()),
        ("a.json", array.clone().into_bytes()),
        ("a.json.gz", gzip(&array)),
        ("a.json.zst", zst(&array)),
        ("a.json", text.clone().into_bytes()),
        ("a.jsonl", array.clone().into_bytes()),
        ("a.jsonl", array.replace('\n', "").into_bytes()),
    ] {
        let (rows, _) = read_bytes(name, &bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(kept(&rows), [1, 2, 3], "{name}");
    }
    let cut = &two_members[..two_members.len() - 9];
    for (name, bytes, says) in [
        ("a.txt", text.as_bytes(), "the name does not say what the file is"),
        ("a.jsonl.gz", text.as_bytes(), "not gzip at all"),
        ("a.jsonl.gz", cut, "the gzip data is damaged, cut"),
        ("a.jsonl.zst", &zst(&text)[..20], "the zstd data is damaged, cut"),
        ("a.jsonl", &gzip(&text), "gzip data; add .gz to its name"),
        ("a.jsonl", &zst(&text), "zstd data; add .zst to its name"),
        ("a.jsonl", b"PAR1....", "a Parquet file; name it .parquet"),
        ("a.parquet", b"PAR1....", "not readable as Parquet"),
        ("a.parquet", b"", "not readable as Parquet"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b" \n\n", "holds no rows"),
        ("a.json", b"", "holds no rows"),
        ("a.json", b"[ ]", "holds no rows"),
        ("a.json", b"3", "no JSON array"),
        ("a.json", b"{\n\"a\": 1}", "one object over several lines"),
        ("a.json", &array.as_bytes()[..array.len() - 20], "end of file inside a value: element 3, which starts at line 3"),
        ("a.json", &array.as_bytes()[..array.len() - 1], "end of file inside a value"),
        ("a.json", format!("{array} x").as_bytes(), "text after the end of the array"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.json", b"<!DOCTYPE html>", "HTML"),
    ] {
        let found = error(name, bytes);
        assert!(found.contains(says), "{name}: {found}");
    }
    let folder = tempfile::tempdir().unwrap();
    assert!(read(folder.path()).unwrap_err().to_string().contains("the name does not say"));
    let absent = read(&folder.path().join("no.jsonl")).unwrap_err().to_string();
    assert!(absent.contains("no.jsonl: cannot open"), "{absent}");
}

#[test]
fn faults_inside_an_array_are_named_by_element_and_line() {
    let text = "[\n {\"messages\": [{\"role\": \"assistant\", \"content\": \"],{\\\"\"}]},\n {\"messages\":\n  NaN},\n , {\"messages\": [{\"role\": \"assistant\", \"content\": \"b\"}]},\n]";
    let (rows, _) = read_bytes("a.json", text.as_bytes()).unwrap();
    assert_eq!((kept(&rows), bad(&rows)), (vec![1, 4], vec![2, 3, 5]));
    assert_eq!(rows[0].as_ref().unwrap().messages[0].content, "],{\"");
    let reasons: Vec<String> = rows.iter().filter_map(|row| row.as_ref().err()).map(BadRow::to_string).collect();
    assert!(reasons[0].contains(":2:") && reasons[0].contains("line 4: NaN is not JSON"), "{reasons:?}");
    assert!(reasons[1].contains("line 5: nothing where a value is expected"), "{reasons:?}");
    assert!(reasons[2].contains("a comma before the end of the array"), "{reasons:?}");
}

#[test]
fn a_long_line_and_an_early_stop() {
    let (rows, _) = read_case("20-very-long-line/long.jsonl.gz");
    assert_eq!(kept(&rows), [1, 2, 3]);
    let lengths: Vec<usize> = rows.iter().flatten().map(|row| row.messages.iter().map(|m| m.content.len()).sum()).collect();
    assert!(lengths[1] > 7_000_000 && lengths[0] < 100, "{lengths:?}");

    let mut seen = 0;
    let report = read_source(0, &case("20-very-long-line/long.jsonl.gz"), &mut |_| {
        seen += 1;
        ControlFlow::Break(())
    });
    assert_eq!((seen, report.unwrap().rows), (1, 1));
}

#[test]
fn rows_before_damage_are_delivered() {
    let row = "{\"messages\": [{\"role\": \"assistant\", \"content\": \"a\"}]}\n";
    let mut bytes = zstd::encode_all(row.repeat(10).as_bytes(), 1).unwrap();
    bytes.extend(b"garbage");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl.zst");
    fs::write(&path, bytes).unwrap();
    let mut delivered = 0;
    let result = read_source(0, &path, &mut |row| {
        delivered += u64::from(row.is_ok());
        ControlFlow::Continue(())
    });
    assert!(result.is_err());
    assert_eq!(delivered, 10);
}

#[test]
fn parquet_as_pyarrow_writes_it() {
    let (rows, report) = read_case("parquet/tools.parquet");
    assert_eq!((kept(&rows), bad(&rows)), (vec![1, 2], vec![3, 4, 5]));
    let first = rows[0].as_ref().unwrap();
    assert_eq!(turns(first), [("user", "Turn slowly by 30."), ("assistant", ""), ("tool", "ok"), ("assistant", "Turned.")]);
    assert_eq!(first.messages[3].loss, Some(0.5));
    let call = |row: usize| rows[row].as_ref().unwrap().messages[1].fields["tool_calls"].to_string();
    assert_eq!(call(0), r#"[{"type":"function","function":{"name":"turn","arguments":{"angle":30,"speed":1}}}]"#);
    assert_eq!(call(1), r#"[{"type":"function","function":{"name":"say","arguments":{"text":"hi"}}}]"#);
    assert!(!first.messages[0].fields.contains_key("tool_calls"), "no null is invented");
    assert_eq!(rows[1].as_ref().unwrap().messages[2].content, "说了。");
    assert_eq!(report.warnings.len(), 1);
    assert!(report.warnings[0].contains("3 null arguments"), "{:?}", report.warnings);

    let (rows, report) = read_case("parquet/text-arguments.parquet");
    let row = rows[0].as_ref().unwrap();
    assert_eq!(row.messages[1].fields["tool_calls"][0]["function"]["arguments"], "{\"angle\": null,  \"speed\":8}");
    assert_eq!(
        row.tools.as_ref().unwrap().to_string(),
        r#"[{"type":"function","function":{"name":"turn","parameters":{"b":null,"a":1}}}]"#
    );
    assert!(report.warnings.is_empty());

    let (rows, _) = read_case("parquet/parts.parquet");
    assert_eq!(turns(rows[0].as_ref().unwrap()), [("user", "Add: 3+4"), ("assistant", "7")]);
    assert!(rows[1].as_ref().unwrap_err().reason.contains("`image`"));

    let (rows, _) = read_case("parquet/alpaca.parquet");
    assert_eq!(kept(&rows), (1..=1000).collect::<Vec<u64>>(), "over four row groups");
    assert_eq!(turns(rows[700].as_ref().unwrap()), [("user", "Question 701"), ("assistant", "Answer 701")]);

    let (rows, _) = read_case("parquet/sharegpt.parquet");
    assert_eq!(turns(rows[0].as_ref().unwrap()), [("user", "Hi"), ("assistant", "Hello.")]);

    let unknown = read(&case("parquet/unknown.parquet")).unwrap_err().to_string();
    assert!(unknown.contains("found: text, label"), "{unknown}");
    let bytes = fs::read(case("parquet/alpaca.parquet")).unwrap();
    assert!(error("a.parquet", &bytes[..bytes.len() / 2]).contains("not readable as Parquet"));
}
