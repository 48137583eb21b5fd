//! Rows: every format, roles, tools, parts of messages, weights.

use super::*;

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
