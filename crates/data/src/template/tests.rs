use super::*;
use crate::testing::{conversation, qwen3, shared};
use serde_json::{Map, Value as Json, json};

fn compile(source: &str) -> Result<ChatTemplate, TemplateError> {
    ChatTemplate::compile("test", source, &Map::new(), &[])
}

fn render(source: &str, messages: &Json) -> Result<Rendered, TemplateError> {
    compile(source)?.render(&conversation(messages))
}

#[test]
fn official_templates_render_byte_for_byte() {
    let Some(folder) = shared("chat") else { return };
    let fixtures: Vec<Json> = serde_json::from_slice(&std::fs::read(folder.join("render_fixtures.json")).unwrap()).unwrap();
    assert!(fixtures.len() >= 21);
    for f in fixtures {
        let name = f["template"].as_str().unwrap();
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let prompt = f["kwargs"]["add_generation_prompt"].as_bool().unwrap_or(false);
        let arguments = f["kwargs"].as_object().unwrap();
        let template = ChatTemplate::compile(name, &source, arguments, &[]).unwrap();
        let c = conversation(&f["messages"]);
        let rendered = template.render_messages(&c.messages, None, prompt).unwrap();
        assert_eq!(rendered.text, f["rendered"].as_str().unwrap(), "{name} {}", f["conv"]);
    }
}

#[test]
fn our_qwen3_renders_as_the_official_one() {
    let Some(tokenizer) = qwen3() else { return };
    let official = ChatTemplate::load(&temper_config::Template::Model, &Map::new(), tokenizer).unwrap();
    let call =
        json!([{"type": "function", "function": {"name": "f", "arguments": {"b": 1.5, "a": null}}}, {"name": "g", "arguments": "{}"}]);
    let conversations = [
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        json!([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "\n\nd"}]),
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"}, {"role": "assistant", "content": "d", "tool_calls": call, "reasoning_content": "\nr\n"}]),
        json!([{"role": "assistant", "content": "a"}, {"role": "system", "content": "s"}, {"role": "user", "content": "<tool_response>x</tool_response>"}]),
        json!([{"role": "user", "content": "c"}, {"role": "assistant", "content": "x</think>y</think>\nz"}, {"role": "assistant", "content": "<think>q</think>w"}]),
    ];
    for thinking in [json!({}), json!({"enable_thinking": false})] {
        let arguments = thinking.as_object().unwrap();
        let official = ChatTemplate::compile("official", official.source(), arguments, &[]).unwrap();
        let ours = ChatTemplate::load(&temper_config::Template::Named("qwen3".into()), arguments, tokenizer).unwrap();
        for messages in &conversations {
            for tools in [None, Some(json!([{"name": "f", "d": "<&>'"}, {"z": [1, {}]}]))] {
                for prompt in [false, true] {
                    let c = conversation(messages);
                    let want = official.render_messages(&c.messages, tools.as_ref(), prompt).unwrap();
                    assert_eq!(ours.render_messages(&c.messages, tools.as_ref(), prompt).unwrap(), want);
                }
            }
        }
    }
}

#[test]
fn tojson_is_pythons() {
    let v = json!([{"role": "assistant", "content": "", "x": {"b": [1, 2.0, true, null, "é<&>'\"\\\n\u{1}"], "a": {}, "c": []}}]);
    let got = render("{{ messages[0].x | tojson }}|{{ messages[0].x | tojson(indent=2) }}", &v).unwrap().text;
    // json.dumps(x, ensure_ascii=False) and with indent=2.
    let flat = "{\"b\": [1, 2.0, true, null, \"é<&>'\\\"\\\\\\n\\u0001\"], \"a\": {}, \"c\": []}";
    let tree = "{\n  \"b\": [\n    1,\n    2.0,\n    true,\n    null,\n    \"é<&>'\\\"\\\\\\n\\u0001\"\n  ],\n  \"a\": {},\n  \"c\": []\n}";
    assert_eq!(got, format!("{flat}|{tree}"));
    let got = render("{{ messages[0].x | tojson(ensure_ascii=true, sort_keys=true, separators=[',', ':']) }}", &v).unwrap().text;
    assert_eq!(got, "{\"a\":{},\"b\":[1,2.0,true,null,\"\\u00e9<&>'\\\"\\\\\\n\\u0001\"],\"c\":[]}");
}

#[test]
fn generation_tags_leave_the_text_as_it_is_without_them() {
    let bodies = [
        "{L}generation{R}\n  x {{ 1 }}\n  {L}endgeneration{R}\n y",
        "a\n  {L}generation{R}\n\nb{L}endgeneration{R}  \n\nc",
        "q {L}generation{R} {L}endgeneration{R}\n",
    ];
    for body in bodies {
        for (l, r) in [("{%", "%}"), ("{%-", "-%}"), ("{%+", "%}"), ("{%", "+%}"), ("{%-", "%}"), ("{% ", " -%}")] {
            // Oracle: `if true` and `endif` in the same places with the same controls.
            let with = body.replace("{L}", &format!("{l} ")).replace("{R}", &format!(" {r}"));
            let without = with.replace("endgeneration", "endif").replace("generation", "if true");
            let messages = json!([{"role": "assistant", "content": ""}]);
            let rendered = render(&with, &messages).unwrap();
            assert_eq!(rendered.text, render(&without, &messages).unwrap().text, "{with:?}");
            assert_eq!(rendered.generation.len(), 1);
        }
    }
}

#[test]
fn generation_spans_are_where_the_template_says() {
    let source = "{# {% generation %} #}{% raw %}{% generation %}{% endraw %}{% for m in messages %}<{{ '{% generation %}' }}{% generation %}{{ m.content }}!{% endgeneration %}>{% endfor %}";
    let rendered =
        render(source, &json!([{"role": "user", "content": "\u{F0000}\u{F0001}"}, {"role": "assistant", "content": "é"}])).unwrap();
    let texts: Vec<&str> = rendered.generation.iter().map(|r| &rendered.text[r.clone()]).collect();
    assert_eq!(texts, ["\u{F0000}\u{F0001}!", "é!"]);
    assert!(rendered.text.starts_with("{% generation %}<{% generation %}"));
}

#[test]
fn errors_name_template_and_line() {
    let messages = json!([{"role": "assistant", "content": "x"}]);
    let e = render("a\n\n{{ raise_exception('no ' + messages[0].content) }}", &messages).unwrap_err();
    assert_eq!(e.to_string(), "template test:3: the template refuses this conversation: no x");
    let e = compile("a\n{% if %}").unwrap_err();
    assert!(e.to_string().starts_with("template test:2: syntax error"), "{e}");
    let e = compile("a\n{% endgeneration %}").unwrap_err();
    assert_eq!(e.to_string(), "template test:2: endgeneration without generation");
    let e = compile("a\n{% generation %}").unwrap_err();
    assert_eq!(e.line, Some(2));
    let e = render("\n{{ messages[0].nothing.more }}", &messages).unwrap_err();
    assert_eq!(e.line, Some(2));
    let e = render("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}", &messages).unwrap_err();
    assert!(e.to_string().contains("fuel"), "{e}");
}

#[test]
fn named_templates_render_what_their_format_says() {
    let c = conversation(
        &json!([{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]),
    );
    let specials = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let text = |source: &str| ChatTemplate::compile("n", source, &Map::new(), &specials).unwrap().render(&c).unwrap().text;
    assert_eq!(
        text(include_str!("builtin/chatml.jinja")),
        "<|im_start|>user\n a <|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    );
    assert_eq!(
        text(include_str!("builtin/alpaca.jinja")),
        "<s>Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n### Instruction:\n a \n\n### Response:\nb</s>\n\n### Instruction:\nc\n\n### Response:\nd</s>"
    );
    let turn = |role: &str, text: &str| format!("<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>");
    let llama = text(include_str!("builtin/llama3.jinja"));
    assert_eq!(llama, format!("<s>{}{}{}{}", turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")));
}

mod fuzz {
    use super::*;
    use proptest::prelude::*;

    fn template_text() -> impl Strategy<Value = String> {
        let pieces = prop::sample::select(vec![
            "{%",
            "%}",
            "{{",
            "}}",
            "{#",
            "#}",
            "-",
            "+",
            " ",
            "\n",
            "generation",
            "endgeneration",
            "for m in messages",
            "endfor",
            "if",
            "endif",
            "m.content",
            "messages[0]",
            "messages[::-1]",
            ".split('x')[5]",
            "| tojson(indent=",
            "(",
            ")",
            "raw",
            "endraw",
            "'",
            "\"",
            "\\",
            "é",
            "macro f(x)",
            "f(f)",
            "endmacro",
            "set x = ",
            "range(9999999999)",
            "* 99999999",
            "loop.index0",
            "| trim",
            "'a'",
            "0",
            "~",
            "strftime_now('%",
            "raise_exception(",
        ]);
        prop::collection::vec(pieces, 0..24).prop_map(|p| p.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        /// Any text as a template and any content as data: an answer or an error, soon, and never a panic.
        #[test]
        fn no_template_panics(source in template_text(), content in ".{0,20}") {
            let messages = json!([{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]);
            let _ = render(&source, &messages);
        }

        /// Contents reach the text as they are, whatever they look like.
        #[test]
        fn contents_are_data(content in ".{0,60}") {
            let messages = json!([{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]);
            let text = render("{% for m in messages %}{{ m.content }}|{% endfor %}", &messages).unwrap().text;
            prop_assert_eq!(text, format!("{content}|x|"));
        }
    }
}
