use super::*;
use crate::IGNORE;
use crate::testing::{case, config, own_template, qwen3, tiny};
use std::collections::{BTreeMap, BTreeSet};
use temper_config::Config;

fn build(c: &Config) -> Dataset {
    let tokenizer = tiny();
    Dataset::build(&c.data, &tokenizer, &own_template(&tokenizer)).unwrap()
}

fn rows(n: usize, file: &Path) {
    let row = |i: usize| {
        let (q, a) = ("q".repeat(i % 7 + 1), "a ".repeat(i % 11 + 1));
        format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{i} {q}\"}},{{\"role\":\"assistant\",\"content\":\"{a}\"}}]}}\n")
    };
    std::fs::write(file, (0..n).map(row).collect::<String>()).unwrap();
}

#[test]
fn every_epoch_trains_every_row_once() {
    for packing in [false, true] {
        let data = format!("train = [\"data.jsonl\"]\nseq_len = 256\npacking = {packing}");
        let c = config(&case("33-resume-data-and-lr"), &data, "steps = 12\nglobal_batch = 4\nmicro_batch = 2\nseed = 5");
        let loader = build(&c).train_plan(&c.train);
        let steps = loader.steps_per_epoch(0);
        if !packing {
            assert_eq!((steps, loader.total_steps()), (3, 12));
        }
        for epoch in 0..4 {
            let batches: Vec<_> = (epoch * steps..(epoch + 1) * steps).map(|s| loader.batch(s)).collect();
            assert_eq!(batches.iter().map(crate::StepBatch::trained_tokens).sum::<usize>(), 546);
            let rows: Vec<u64> = batches.iter().flat_map(|b| &b.micro).flat_map(|m| &m.samples).map(|s| s.row).collect();
            assert_eq!(rows.len(), 12);
            assert_eq!(rows.iter().copied().collect::<BTreeSet<_>>(), (1..=12).collect());
            assert!((batches[steps - 1].epoch - (epoch + 1) as f64).abs() < 1e-9);
        }
    }
}

#[test]
fn one_step_sees_the_same_rows_however_it_is_cut() {
    for packing in [false, true] {
        for micro_batch in [1, 2, 4] {
            let data = format!("train = [\"data.jsonl\"]\nseq_len = 256\npacking = {packing}");
            let c = config(&case("22-gradient-accumulation"), &data, &format!("steps = 3\nglobal_batch = 4\nmicro_batch = {micro_batch}"));
            let loader = build(&c).train_plan(&c.train);
            for step in 0..3 {
                let batch = loader.batch(step);
                assert_eq!(batch.trained_tokens(), 141);
                let rows: BTreeSet<u64> = batch.micro.iter().flat_map(|m| &m.samples).map(|s| s.row).collect();
                assert_eq!(rows, (1..=4).collect());
            }
        }
    }
    let c = config(&case("22-gradient-accumulation"), "train = [\"one-masked.jsonl\"]\nseq_len = 256", "steps = 1\nglobal_batch = 4");
    let dataset = build(&c);
    assert_eq!(dataset.train_plan(&c.train).batch(0).trained_tokens(), 59);
    assert_eq!(dataset.report().cut.dropped_no_trained_token, 1);
}

#[test]
fn batches_hold_what_they_say() {
    let c = config(
        &case("22-gradient-accumulation"),
        "train = [\"data.jsonl\"]\nseq_len = 256\npacking = true",
        "global_batch = 4\nmicro_batch = 4",
    );
    let dataset = build(&c);
    for m in &dataset.train_plan(&c.train).batch(0).micro {
        assert_eq!((m.targets.len(), m.weights.len(), m.positions.len()), (m.ids.len(), m.ids.len(), m.ids.len()));
        assert_eq!((m.cu_seqlens[0], *m.cu_seqlens.last().unwrap() as usize), (0, m.ids.len()));
        for (bounds, _) in m.cu_seqlens.windows(2).zip(&m.samples) {
            let (from, to) = (bounds[0] as usize, bounds[1] as usize);
            assert_eq!(m.positions[from..to], (0..(to - from) as i32).collect::<Vec<_>>());
            assert_eq!((m.targets[to - 1], m.weights[to - 1]), (IGNORE, 0.0));
            for t in from..to - 1 {
                assert_eq!(m.targets[t] == IGNORE, m.weights[t] == 0.0);
                assert!(m.targets[t] == IGNORE || m.targets[t] == m.ids[t + 1]);
            }
        }
        // Unshifted again, the preview shows the same tokens.
        let lines = crate::preview_batch(&c.data, &tiny(), m, 0).unwrap();
        assert_eq!(lines.iter().map(|l| l.trained_tokens).sum::<usize>(), m.trained_tokens());
        assert_eq!(lines.iter().map(|l| l.input_ids.len()).sum::<usize>(), m.ids.len());
    }
}

#[test]
fn any_step_can_be_asked_for_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    rows(37, &folder.path().join("d.jsonl"));
    let c = config(folder.path(), "train = [\"d.jsonl\"]\nseq_len = 64\npacking = true", "epochs = 2.5\nglobal_batch = 3\nmicro_batch = 1");
    let dataset = build(&c);
    let loader = dataset.train_plan(&c.train);
    let forward: Vec<_> = (0..loader.total_steps()).map(|s| loader.batch(s)).collect();
    let half = loader.steps_per_epoch(2).div_ceil(2);
    assert_eq!(forward.len(), loader.steps_per_epoch(0) + loader.steps_per_epoch(1) + half);
    let fresh = build(&c).train_plan(&c.train);
    for step in (0..forward.len()).rev() {
        assert_eq!(fresh.batch(step), forward[step]);
    }
}

#[test]
fn evaluation_and_training_do_not_overlap() {
    let folder = tempfile::tempdir().unwrap();
    rows(100, &folder.path().join("d.jsonl"));
    let text = std::fs::read_to_string(folder.path().join("d.jsonl")).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.reverse();
    std::fs::write(folder.path().join("r.jsonl"), lines.join("\n")).unwrap();
    let held_out = |file: &str| {
        let c = config(folder.path(), &format!("train = [\"{file}\"]\neval_split = 0.2"), "global_batch = 100");
        let dataset = build(&c);
        let documents = |batches: &[MicroBatch]| {
            let documents =
                |m: &MicroBatch| m.cu_seqlens.windows(2).map(|b| m.ids[b[0] as usize..b[1] as usize].to_vec()).collect::<Vec<_>>();
            batches.iter().flat_map(documents).collect::<BTreeSet<_>>()
        };
        let eval = documents(&dataset.eval_batches(4, 0));
        let train = documents(&dataset.train_plan(&c.train).batch(0).micro);
        assert_eq!((eval.len(), train.len()), (20, 80));
        assert!(eval.is_disjoint(&train));
        assert_eq!(documents(&dataset.eval_batches(3, 5)).len(), 5);
        assert_eq!((dataset.report().kept, dataset.report().eval), (80, 20));
        eval
    };
    assert_eq!(held_out("d.jsonl"), held_out("r.jsonl"));
}

#[test]
fn weights_say_how_often_a_source_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    rows(10, &folder.path().join("a.jsonl"));
    rows(10, &folder.path().join("b.jsonl"));
    let data = "train = [{ path = \"a.jsonl\", weight = 2.0 }, { path = \"b.jsonl\", weight = 0.5 }]";
    let c = config(folder.path(), data, "global_batch = 25\nepochs = 2");
    let loader = build(&c).train_plan(&c.train);
    assert_eq!(loader.total_steps(), 2);
    let mut seen: BTreeMap<(u32, u64), usize> = BTreeMap::new();
    for sample in (0..2).flat_map(|s| loader.batch(s).micro).flat_map(|m| m.samples) {
        *seen.entry((sample.source, sample.row)).or_default() += 1;
    }
    assert!((1..=10).all(|row| seen[&(0, row)] == 4 && seen[&(1, row)] == 1));
}

#[test]
fn the_cache_gives_the_same_data_and_is_made_again_when_damaged() {
    let folder = tempfile::tempdir().unwrap();
    rows(50, &folder.path().join("d.jsonl"));
    let mut c = config(folder.path(), "train = [\"d.jsonl\"]\nseq_len = 32", "");
    let plain = build(&c);
    c.data.cache_dir = Some(folder.path().join("cache"));
    let cold = build(&c);
    let warm = build(&c);
    assert!(!cold.report().sources[0].cached && warm.report().sources[0].cached);
    assert_eq!((plain.fingerprint(), cold.fingerprint()), (warm.fingerprint(), warm.fingerprint()));
    assert_eq!(plain.report().cut, warm.report().cut);
    let file = std::fs::read_dir(folder.path().join("cache")).unwrap().next().unwrap().unwrap().path();
    std::fs::write(&file, "nonsense").unwrap();
    let again = build(&c);
    assert!(again.report().notices[0].contains("is made again"), "{:?}", again.report().notices);
    assert_eq!(again.fingerprint(), plain.fingerprint());
    assert!(build(&c).report().sources[0].cached);
    c.data.loss = temper_config::LossOn::All;
    assert!(!build(&c).report().sources[0].cached);
}

#[test]
fn nothing_trainable_and_too_many_bad_rows_stop_a_run() {
    let c = config(&case("09-truncation"), "train = [\"all-long.jsonl\"]\nseq_len = 48", "");
    let error = build(&c).ensure_trainable().unwrap_err().to_string();
    assert!(error.contains("no trainable token is left at seq_len = 48"), "{error}");
    let c = config(&case("13-role-order-and-names"), "train = [\"data.jsonl\"]", "");
    let dataset = build(&c);
    assert_eq!((dataset.report().rows, dataset.report().bad_rows, dataset.report().kept), (9, 5, 4));
    let error = dataset.ensure_trainable().unwrap_err().to_string();
    assert!(error.starts_with("data.max_bad_rows: 5 of 9 rows are bad"), "{error}");
    assert!(error.contains("data.jsonl:6:") && error.contains("bot"), "{error}");
    let c = config(&case("13-role-order-and-names"), "train = [\"data.jsonl\"]\nmax_bad_rows = 0.6", "");
    build(&c).ensure_trainable().unwrap();
}

#[test]
fn counts_add_up_under_every_policy() {
    let Some(tokenizer) = qwen3() else { return };
    let template = own_template(tokenizer);
    let report = |policy: &str| {
        let c = config(&case("09-truncation"), &format!("train = [\"data.jsonl\"]\nseq_len = 48\nover_long = \"{policy}\""), "");
        Dataset::build(&c.data, tokenizer, &template).unwrap().report().clone()
    };
    let r = report("truncate");
    assert_eq!((r.rows, r.kept, r.cut.over_long, r.cut.truncated, r.cut.dropped_no_trained_token), (5, 4, 3, 2, 1));
    assert_eq!(r.lengths.max, 88);
    let r = report("drop");
    assert_eq!((r.kept, r.cut.over_long, r.cut.dropped_over_long, r.cut.dropped_no_trained_token), (2, 3, 3, 0));
    let r = report("split");
    assert_eq!((r.kept, r.cut.split, r.cut.dropped_over_long), (5, 3, 0));
    assert!(r.table().contains("over-long"));
    assert!(serde_json::to_string(&r).unwrap().contains("\"dropped_no_trained_token\":0"));
}

#[test]
fn pieces_train_every_token_once() {
    for length in 2..40 {
        for seq_len in 2..12 {
            let ids: Vec<u32> = (0..length).collect();
            let mut samples = Samples::default();
            samples.push(1, &ids, &[crate::TokenSpan { start: 0, end: length, weight: 1.0 }]);
            let mut counts = CutCounts::default();
            let pieces = cut(samples.get(0), temper_config::OverLong::Split, seq_len, &mut counts).unwrap();
            let mut targets = Vec::new();
            for (start, end) in pieces {
                assert!((end - start) as usize <= seq_len);
                let weights = samples.get(0).weights(start as usize, end as usize);
                targets.extend(weights.iter().enumerate().filter(|(_, w)| **w > 0.0).map(|(t, _)| start + t as u32));
            }
            assert_eq!(targets, (1..length).collect::<Vec<_>>(), "{length} {seq_len}");
        }
    }
}

/// Times on this machine, printed: `cargo test --release -p temper-data -- --ignored --nocapture speed`.
#[test]
#[ignore = "a measurement"]
fn speed_of_52_000_rows() {
    let Some(tokenizer) = qwen3() else { return };
    let template = own_template(tokenizer);
    let folder = tempfile::tempdir().unwrap();
    let word =
        |i: u64| ["the", "of", "a list", "water", "explain", "42", "process", "making", "quickly", "\\n", "is", "and"][(i % 12) as usize];
    let text = |i: u64, n: u64| (0..n).map(|k| word((i * 31 + k * k * 7 + k) >> 1)).collect::<Vec<_>>().join(" ");
    let row = |i: u64| {
        let (q, a) = (text(i, 14), text(i + 9, 20 + i % 80));
        format!("{{\"instruction\":\"{i} {q}\",\"input\":\"\",\"output\":\"{a}\"}}\n")
    };
    std::fs::write(folder.path().join("d.jsonl"), (0..52_000).map(row).collect::<String>()).unwrap();
    let mut c = config(folder.path(), "train = [\"d.jsonl\"]\nseq_len = 2048\npacking = true", "epochs = 3");
    c.data.cache_dir = Some(folder.path().join("cache"));
    for name in ["cold", "warm"] {
        let start = std::time::Instant::now();
        let dataset = Dataset::build(&c.data, tokenizer, &template).unwrap();
        let built = start.elapsed();
        let steps = dataset.train_plan(&c.train).total_steps();
        eprintln!("{name}: {built:?}, {} tokens, {steps} steps planned in {:?}", dataset.report().tokens, start.elapsed() - built);
    }
}
