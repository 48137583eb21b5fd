//! The sinks over a run's events: what they leave on disk, what survives a kill and a resume, what a failing disk does.

use serde_json::Value;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use temper_monitor::{Curve, EventLog, Fan, Progress, Target, TensorBoard};
use temper_train::events::{End, Eval, Event, Loading, Notice, Saved, Sink, Start, Step};

fn start(first: usize, steps: usize) -> Event {
    Event::Start(Start {
        step: first,
        steps,
        params: 134_500_000,
        active_params: 134_500_000,
        backend: "cpu, 2 threads".to_string(),
        resumed_from: (first > 1).then(|| first - 1),
        ranks: 4,
        layout: Some("tp 2, pp 2".to_string()),
        samples: 1234,
        sequences: 567,
        startup_s: 1.25,
        loaded: Some(Loading {
            bytes: 3 << 30,
            wanted_bytes: 3 << 30,
            wall_s: 2.0,
            gb_per_s: 1.61,
            ranks: 4,
            all_bytes: 12 << 30,
            all_gb_per_s: 6.2,
        }),
    })
}

fn step(step: usize, loss: f64) -> Event {
    Event::Step(Step {
        step,
        epoch: step as f64 / 10.0,
        loss,
        aux_loss: None,
        z_loss: None,
        grad_norm: 0.984,
        lr: 1e-5,
        tokens: 2048,
        trained_tokens: 1024,
        tokens_per_s: 1234.4,
        model_tflops: 0.05,
        mfu: None,
        mem_peak_bytes: 1_288_490_189,
        wall_s: 2.0,
        skipped: false,
    })
}

fn eval(step: usize, loss: f64) -> Event {
    Event::Eval(Eval { step, loss, perplexity: loss.exp(), trained_tokens: 4096, wall_s: 1.0 })
}

fn end(step: usize) -> Event {
    Event::End(End { step, loss: 1.5, tokens: 20480, wall_s: 192.0, skipped: 0 })
}

fn send(sink: &mut impl Sink, events: &[Event]) {
    for event in events {
        sink.event(event);
    }
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A writer whose content the test can see.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_log_holds_every_event_as_soon_as_it_happens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("events.jsonl");
    let events = [start(1, 2), step(1, 2.5), eval(1, 2.25), step(2, 2.0), end(2)];
    let mut log = EventLog::open(&path).unwrap();
    for (n, event) in events.iter().enumerate() {
        log.event(event);
        assert_eq!(lines(&path).len(), n + 1);
    }
    let read: Vec<Event> = fs::read_to_string(&path).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(read, events);
    assert_eq!(lines(&path)[1]["event"], "step");
}

#[test]
fn a_resumed_log_keeps_whole_lines_and_repairs_a_torn_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("events.jsonl");
    let whole = "{\"event\":\"step\",\"step\":1}\n";
    for (tail, kept) in [
        ("", ""),
        ("{\"event\":\"st", ""),
        ("{\"event\":\"step\",\"step\":2}", "{\"event\":\"step\",\"step\":2}\n"),
        ("2", ""),
        ("\0\0\0\0", ""),
        // Cut inside a character, and longer than the block that is searched.
        ("{\"message\":\"\u{e9}", ""),
    ] {
        fs::write(&path, format!("{whole}{tail}")).unwrap();
        EventLog::open(&path).unwrap().event(&end(2));
        let expected = format!("{whole}{kept}{}\n", serde_json::to_string(&end(2)).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), expected, "{tail:?}");
    }
    fs::write(&path, format!("{whole}{}", "x".repeat(200_000))).unwrap();
    drop(EventLog::open(&path).unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), whole);
    // A log that is nothing but a torn line, and an empty one.
    for text in ["{\"ev", ""] {
        fs::write(&path, text).unwrap();
        EventLog::open(&path).unwrap().event(&end(2));
        assert_eq!(lines(&path).len(), 1);
    }
}

#[test]
fn a_run_folder_holds_log_curve_and_tensorboard_also_after_a_resume() {
    let dir = tempfile::tempdir().unwrap();
    let mut fan = Fan::for_run(dir.path(), true).unwrap();
    send(&mut fan, &[start(1, 6), step(1, 3.0), eval(1, 3.5), step(2, f64::NAN), step(3, 9.0), step(4, 9.0)]);
    drop(fan);
    // The run was killed after step 4; its last checkpoint is that of step 2.
    let mut fan = Fan::for_run(dir.path(), true).unwrap();
    send(&mut fan, &[start(3, 6), step(3, 1.75), step(4, 1.5), eval(4, 1.25), end(4)]);
    drop(fan);

    let steps: Vec<u64> =
        lines(&dir.path().join("events.jsonl")).iter().filter(|e| e["event"] == "step").map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 3, 4]);
    let svg = fs::read_to_string(dir.path().join("loss.svg")).unwrap();
    assert!(svg.contains("step 4 of 6") && svg.contains("loss 1.5000") && svg.contains("1 not finite"), "{svg}");
    assert!(svg.contains("evaluation 1.2500 (perplexity 3.490)"), "{svg}");
    // The losses of the abandoned steps are gone: 9.0 would be the top of the axis.
    assert!(!svg.contains(">8<") && svg.contains(">3.0<"), "{svg}");
    assert_eq!(fs::read_dir(dir.path().join("tensorboard")).unwrap().count(), 2);
    let left: Vec<String> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn the_curve_of_a_run_that_fails_is_drawn_too() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("loss.svg");
    let mut curve = Curve::open(svg.clone(), &dir.path().join("events.jsonl")).unwrap();
    send(&mut curve, &[start(1, 100), step(1, 3.0)]);
    assert!(fs::read_to_string(&svg).unwrap().contains("step 1 of 100"), "the first step is shown at once");
    send(&mut curve, &[step(2, 2.0), step(3, 1.0)]);
    drop(curve);
    assert!(fs::read_to_string(&svg).unwrap().contains("step 3 of 100"));
    // Lines that are no events do not spoil the rest.
    fs::write(dir.path().join("events.jsonl"), "garbage\n[1]\n{\"event\":\"step\",\"step\":7,\"loss\":2.5}\n\n{\"event\":\"step\"}\n")
        .unwrap();
    let mut curve = Curve::open(svg.clone(), &dir.path().join("events.jsonl")).unwrap();
    curve.event(&step(8, 2.0));
    drop(curve);
    assert!(fs::read_to_string(&svg).unwrap().contains("step 8"));
}

/// A sink that is only told how far an evaluation is.
struct Heard(Arc<Mutex<Vec<(usize, usize)>>>);

impl Sink for Heard {
    fn event(&mut self, _: &Event) {}

    fn evaluating(&mut self, done: usize, of: usize) {
        self.0.lock().unwrap().push((done, of));
    }
}

#[test]
fn every_sink_hears_of_a_long_evaluation() {
    let heard = Arc::<Mutex<Vec<_>>>::default();
    let mut fan = Fan::new().with(Heard(heard.clone())).with(Heard(heard.clone()));
    fan.evaluating(3, 7);
    assert_eq!(*heard.lock().unwrap(), [(3, 7), (3, 7)]);
}

#[test]
fn plain_lines_say_what_happened() {
    let out = Shared::default();
    let mut progress = Progress::new(Target::Lines(Box::new(out.clone())), 5);
    send(&mut progress, &[start(1, 101)]);
    let mut events: Vec<Event> = (1..=12).map(|i| step(i, 1.23454)).collect();
    events.extend([
        eval(12, 2.0),
        Event::Checkpoint(Saved {
            step: 12,
            path: "run/checkpoints/step-000012".to_string(),
            bytes: 3 << 30,
            wall_s: 65.0,
            paused_s: Some(2.0),
        }),
        Event::Notice(Notice { message: "rows dropped\u{1b}[31m".to_string(), count: Some(1200) }),
        step(101, 0.5),
        end(101),
    ]);
    send(&mut progress, &events);
    let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
    let expected = "\
start  steps 1 to 101  134.5 M parameters  1,234 samples in 567 sequences  cpu, 2 threads  4 ranks: tp 2, pp 2  ready in 1.2s
read   3.0 GiB in 2.0s, 1.61 GB/s  (4 ranks: 12.0 GiB, 6.20 GB/s)
step   1/101  loss 1.2345  grad 0.98  lr 1.0e-5  1,234 tok/s  eta 3m20s  mem 1.2 GiB
step   5/101  loss 1.2345  grad 0.98  lr 1.0e-5  1,234 tok/s  eta 3m12s  mem 1.2 GiB
step  10/101  loss 1.2345  grad 0.98  lr 1.0e-5  1,234 tok/s  eta 3m02s  mem 1.2 GiB
eval after step 12  loss 2.0000  perplexity 7.389  4,096 tokens  1.0s
saved step 12  run/checkpoints/step-000012  3.0 GiB in 1m05s, 0.05 GB/s, training paused 2.0s
note  rows dropped [31m (1,200)
step 101/101  loss 0.5000  grad 0.98  lr 1.0e-5  1,234 tok/s  mem 1.2 GiB
done  step 101  loss 1.5000  20,480 tokens in 3m12s
";
    assert_eq!(text, expected);
}

#[test]
fn mixture_of_experts_and_skipped_updates_are_shown() {
    let out = Shared::default();
    let mut progress = Progress::new(Target::Lines(Box::new(out.clone())), 1);
    let Event::Step(mut odd) = step(1, f64::NAN) else { unreachable!() };
    (odd.aux_loss, odd.skipped, odd.grad_norm, odd.tokens_per_s) = (Some(1.0345), true, f64::INFINITY, f64::NAN);
    send(&mut progress, &[start(1, 1), Event::Step(odd)]);
    let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
    assert!(text.contains("loss NaN  aux 1.034  grad inf") && text.contains("update skipped"), "{text}");
    // The bar is only looked at by people; here it must merely survive.
    let mut bar = Progress::new(Target::Bar, 1);
    send(&mut bar, &[start(1, 2), step(1, 2.0), eval(1, 2.0), step(2, 1.0), end(2)]);
}

#[test]
fn a_disk_that_fails_does_not_stop_the_run() {
    let full = Path::new("/dev/full");
    if full.exists() {
        send(&mut EventLog::open(full).unwrap(), &[start(1, 2), step(1, 2.0), end(1)]);
    } else {
        println!("SKIPPED: no /dev/full on this machine");
    }
    let dir = tempfile::tempdir().unwrap();
    let gone = dir.path().join("run");
    fs::create_dir(&gone).unwrap();
    let mut fan = Fan::for_run(&gone, true).unwrap();
    fs::remove_dir_all(&gone).unwrap();
    send(&mut fan, &[start(1, 2), step(1, 2.0), eval(1, 2.0), end(1)]);
    assert!(!gone.exists());
    let message = Fan::for_run(&gone, false).err().unwrap().to_string();
    assert!(message.contains("run/events.jsonl"), "{message}");
}

#[test]
fn tensorboard_reads_what_is_written() {
    let Some(python) = python() else { return };
    let dir = tempfile::tempdir().unwrap();
    let Event::Step(mut moe) = step(2, 2.0) else { unreachable!() };
    moe.aux_loss = Some(1.25);
    let mut board = TensorBoard::open(dir.path()).unwrap();
    send(&mut board, &[start(1, 6), step(1, 3.0), Event::Step(moe), eval(2, 2.5), step(3, 9.0), step(4, 9.0)]);
    drop(board);
    let mut board = TensorBoard::open(dir.path()).unwrap();
    send(&mut board, &[start(3, 6), step(3, 1.75), end(3)]);
    drop(board);
    let script = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
a = EventAccumulator(sys.argv[1]); a.Reload()
print(json.dumps({t: [[e.step, e.value] for e in a.Scalars(t)] for t in a.Tags()['scalars']}))
";
    let output = Command::new(&python).args(["-c", script]).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Steps 3 and 4 of the abandoned attempt have given way to the resumed one.
    assert_eq!(read["train/loss"], serde_json::json!([[1, 3.0], [2, 2.0], [3, 1.75]]));
    assert_eq!(read["train/aux_loss"], serde_json::json!([[2, 1.25]]));
    assert_eq!(read["eval/loss"], serde_json::json!([[2, 2.5]]));
    for tag in ["train/grad_norm", "train/learning_rate", "train/tokens_per_second", "train/memory_gib"] {
        assert_eq!(read[tag].as_array().map(Vec::len), Some(3), "{tag} in {read}");
    }
    assert!((read["eval/perplexity"][0][1].as_f64().unwrap() - 2.5f64.exp()).abs() < 1e-5);
}

/// A Python with the tensorboard package: `TEMPER_TEST_PYTHON`.
fn python() -> Option<PathBuf> {
    let Some(python) = std::env::var_os("TEMPER_TEST_PYTHON").map(PathBuf::from) else {
        println!("SKIPPED: TEMPER_TEST_PYTHON names no Python with the tensorboard package");
        return None;
    };
    let found = Command::new(&python).args(["-c", "import tensorboard"]).output().is_ok_and(|o| o.status.success());
    if !found {
        println!("SKIPPED: {} has no tensorboard package", python.display());
    }
    found.then_some(python)
}
