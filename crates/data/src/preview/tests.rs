use super::*;
use crate::testing::{case, config, own_template, qwen3, tiny};
use serde_json::Value;

/// Everything a preview delivers: lines, bad rows, dropped rows.
fn all(data: &Data, tokenizer: &Tokenizer) -> (Vec<PreviewLine>, Vec<BadRow>, Vec<BadRow>) {
    let (mut lines, mut bad, mut dropped) = (Vec::new(), Vec::new(), Vec::new());
    preview(data, tokenizer, &own_template(tokenizer), &mut |item| {
        match item {
            PreviewItem::Line(line) => lines.push(line),
            PreviewItem::Bad(row) => bad.push(row),
            PreviewItem::Dropped(row) => dropped.push(row),
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    (lines, bad, dropped)
}

fn expected(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(case(name).join("expected.json")).unwrap()).unwrap()
}

/// A line is right when text and ids are equal, and labels are outside the positions where conventions differ.
/// The newline after an end token is never trained, an inserted think block always.
fn assert_lines(name: &str, lines: &[PreviewLine], want: &Value) {
    let want = want.as_array().unwrap();
    assert_eq!(lines.len(), want.len(), "{name}");
    for (i, (line, w)) in lines.iter().zip(want).enumerate() {
        let numbers = |key: &str| w[key].as_array().map(|a| a.iter().map(|v| v.as_i64().unwrap() as i32).collect::<Vec<_>>());
        if let Some(text) = w["text"].as_str() {
            assert_eq!(line.text, text, "{name} {i}");
        }
        assert_eq!(line.input_ids, numbers("input_ids").unwrap(), "{name} {i}");
        let optional = numbers("optional").unwrap_or_default();
        for (t, (got, want)) in line.labels.iter().zip(numbers("labels").unwrap()).enumerate() {
            assert!(*got == IGNORE || *got == line.input_ids[t], "{name} {i} {t}");
            if !optional.contains(&(t as i32)) {
                assert_eq!(*got, want, "{name} {i} {t}");
            } else if line.input_ids[t] == 198 {
                assert_eq!(*got, IGNORE, "{name} {i} {t}: the newline after an end token");
            }
        }
    }
}

#[test]
fn reported_faults_come_out_right() {
    let Some(tokenizer) = qwen3() else { return };
    for name in [
        "01-multi-turn-thinking",
        "03-tool-arguments-null",
        "05-null-content-tool-turns",
        "07-template-without-generation-block",
        "11-content-as-parts",
        "13-role-order-and-names",
    ] {
        let c = config(&case(name), "train = [\"data.jsonl\"]\nseq_len = 4096", "");
        let (lines, bad, dropped) = all(&c.data, tokenizer);
        assert_eq!(dropped, []);
        let want = expected(name);
        assert_lines(name, &lines[..want["samples"].as_array().unwrap().len()], &want["samples"]);
        let rows: Vec<u64> = bad.iter().map(|b| b.row).collect();
        if let Some(bad_rows) = want["bad_rows"].as_array() {
            assert_eq!(rows, bad_rows.iter().map(|v| v.as_u64().unwrap()).collect::<Vec<_>>());
        }
    }
}

#[test]
fn sharegpt_rows_come_out_right() {
    let Some(tokenizer) = qwen3() else { return };
    let name = "13-role-order-and-names";
    let c = config(&case(name), "train = [\"sharegpt.jsonl\"]\nseq_len = 4096", "");
    let (lines, bad, _) = all(&c.data, tokenizer);
    assert_lines(name, &lines, &expected(name)["sharegpt"]["samples"]);
    assert_eq!(bad.iter().map(|b| b.row).collect::<Vec<_>>(), [4]);
}

#[test]
fn end_tokens_are_trained_when_they_pad() {
    let name = "08-pad-equals-eos";
    let tokenizer = Tokenizer::load(&case(name).join("tok-pad-eos")).unwrap();
    let c = config(&case(name), "train = [\"data.jsonl\"]\nseq_len = 128", "");
    let (lines, ..) = all(&c.data, &tokenizer);
    assert_lines(name, &lines, &expected(name)["samples"]);
    assert_eq!(lines.iter().map(|l| l.trained_tokens).sum::<usize>(), 19);
}

#[test]
fn truncation_drops_or_splits_as_it_says() {
    let Some(tokenizer) = qwen3() else { return };
    let name = "09-truncation";
    let want = expected(name);
    let run = |policy: &str| {
        let c = config(&case(name), &format!("train = [\"data.jsonl\"]\nseq_len = 48\nover_long = \"{policy}\""), "");
        all(&c.data, tokenizer)
    };
    let rows = |lines: &[PreviewLine]| lines.iter().map(|l| l.row).collect::<Vec<_>>();

    let (lines, _, dropped) = run("truncate");
    assert_eq!(rows(&lines), [2, 3, 4, 5]);
    assert_lines(name, &lines, &want["truncate"]["samples"]);
    assert_eq!(dropped.len(), 1);
    assert!(dropped[0].to_string().ends_with("data.jsonl:1: dropped: no trained token"), "{}", dropped[0]);

    let (lines, _, dropped) = run("drop");
    assert_eq!(rows(&lines), [3, 4]);
    assert_eq!(dropped.iter().map(|d| d.row).collect::<Vec<_>>(), [1, 2, 5]);

    let (lines, ..) = run("split");
    let trained = |row: u64| lines.iter().filter(|l| l.row == row).map(|l| l.trained_tokens).sum::<usize>() as u64;
    assert_eq!(trained(2), want["split"]["row2_trained_tokens_in_all_pieces"].as_u64().unwrap());
    assert!(lines.iter().all(|l| l.input_ids.len() <= 48 && l.trained_tokens > 0));
    // The pieces of a row join to its text, one token of context apart.
    let pieces: Vec<_> = lines.iter().filter(|l| l.row == 2).collect();
    assert_eq!(pieces[0].input_ids[47], pieces[1].input_ids[0]);
    assert_eq!(pieces[1].labels[0], IGNORE);
}

#[test]
fn a_very_long_row_is_cut_and_its_neighbours_are_kept() {
    let Some(tokenizer) = qwen3() else { return };
    let name = "20-very-long-line";
    let c = config(&case(name), "train = [\"long.jsonl.gz\"]\nseq_len = 256", "");
    let (lines, bad, dropped) = all(&c.data, tokenizer);
    assert_lines(name, &lines, &expected(name)["samples_1_and_3"]);
    assert_eq!((bad.len(), dropped.iter().map(|d| d.row).collect::<Vec<_>>()), (0, vec![2]));
}

#[test]
fn fractional_weights_show_and_runs_join_to_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let rows = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a","loss":0.3},{"role":"user","content":"r"},{"role":"assistant","content":"b"}]}"#;
    std::fs::write(folder.path().join("d.jsonl"), rows).unwrap();
    let tokenizer = tiny();
    let c = config(folder.path(), "train = [\"d.jsonl\"]", "");
    let (lines, ..) = all(&c.data, &tokenizer);
    let line = &lines[0];
    let weights = line.loss_weights.as_ref().unwrap();
    assert_eq!(weights.iter().filter(|w| **w == 0.3).count(), 2);
    assert_eq!(weights.iter().filter(|w| **w == 1.0).count(), 2);
    let runs = runs(&tokenizer, line).unwrap();
    let trained: Vec<&str> = runs.iter().filter(|r| r.trained).map(|r| r.text.as_str()).collect();
    assert_eq!(trained, ["a<|im_end|>", "b<|im_end|>"]);
    assert_eq!(runs.iter().map(|r| r.text.as_str()).collect::<String>(), line.text);
}
