//! Files: encodings, broken JSON, containers, damage.

use super::*;

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
