//! Activations, routed rows and logits: every tensor with its shape, from what layers keep to the fullest moment.

use super::{Explanation, n};
use crate::memory::{Dims, Layer, Moment, Part, Purpose, Question, Tensor, moment_tensors};
use crate::plan::{Plan, StagePlan};

/// Layers of one kind on the stage.
struct Layers {
    name: &'static str,
    count: f64,
    /// Of them in one micro-batch those whose backward pass is over at the peak.
    gone: f64,
    layer: Layer,
}

fn layers(plan: &Plan, stage: &StagePlan, d: &Dims) -> Vec<Layers> {
    let account = plan.run.job.account;
    let gone: &[usize] = match stage.peak.moment {
        Moment::Layer(at) => stage.stage.after.get(at).map_or(&[], Vec::as_slice),
        Moment::Loss => &[],
    };
    let kinds = plan.run.network.kinds.kinds.iter().zip(&stage.stage.kinds).enumerate().filter(|(_, (_, count))| **count > 0);
    kinds
        .map(|(i, (kind, count))| Layers {
            name: match (kind.linear, kind.experts) {
                (false, false) => "attention, dense",
                (false, true) => "attention, experts",
                (true, false) => "linear attention, dense",
                (true, true) => "linear attention, experts",
            },
            count: *count as f64,
            gone: gone.get(i).map_or(0.0, |n| *n as f64),
            layer: Layer::new(d, kind.linear, kind.experts, 1.0, account),
        })
        .collect()
}

/// Micro-batches in flight.
pub(super) fn flights(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let (l, turns) = (&plan.layout, plan.layout.turns(plan.run.job.global_batch));
    let (s, m) = (stage.stage.index, turns.real);
    let chunks = turns.in_flight(s, l.pp, l.vpp);
    if l.vpp == 1 {
        e.because("1F1B (Narayanan et al. 2021): a stage runs ahead by the stages after it.");
        let formula = format!("the lesser of pp - stage and the {m} micro-batches; here stage {s} of {}", l.pp);
        return e.line(formula, n(chunks as f64), chunks as f64, "micro-batches");
    }
    e.because("Interleaved 1F1B, Megatron's warm-up: (pp - 1 - stage) x 2 + (vpp - 1) x pp chunks, and one more.");
    let formula = format!("chunks / vpp; here stage {s} of {}", l.pp);
    e.line(formula, format!("{chunks} / {}", l.vpp), chunks as f64 / l.vpp as f64, "micro-batches");
}

/// A tensor with its shape.
fn tensor(e: &mut Explanation, what: &str, x: &Tensor) {
    let gone = if x.rows < 0.0 { "gone by then: " } else { "" };
    e.line(
        format!("{what}: {gone}{}, rows x width x bytes", x.name),
        format!("{} x {} x {}", n(x.rows), n(x.width), n(x.each)),
        x.bytes(),
        "B",
    );
}

fn sum(values: impl Iterator<Item = f64>) -> (String, f64) {
    let values: Vec<f64> = values.collect();
    let words = if values.is_empty() { n(0.0) } else { values.iter().map(|v| n(*v)).collect::<Vec<_>>().join(" + ") };
    (words, values.iter().sum())
}

/// Bytes of one part (plain or of the experts) at the fullest moment, which is the last line.
fn account(plan: &Plan, stage: &StagePlan, part: Part, purpose: Purpose, e: &mut Explanation) {
    let run = &plan.run;
    let d = Dims::new(&run.network, &run.job, &plan.layout);
    flights(plan, stage, e);
    let mut terms = Vec::new();
    for kind in layers(plan, stage, &d) {
        let kept: Vec<Tensor> = kind.layer.listed(plan.layout.recompute, true).filter(|x| x.part == part).collect();
        kept.iter().for_each(|x| tensor(e, &format!("kept ({})", kind.name), x));
        let (numbers, one) = sum(kept.iter().map(Tensor::bytes));
        e.line(format!("kept by a layer ({}) for a micro-batch", kind.name), numbers, one, "B");
        terms.push(format!("({} x {} - {}) x {}", n(kind.count), n(stage.peak.flights), n(kind.gone), n(one)));
    }
    let question = Question { network: &run.network, job: &run.job, layout: &plan.layout, overheads: run.overheads };
    let moment = if stage.peak.at_loss() { "in the loss" } else { "in a layer's backward pass" };
    let moving: Vec<Tensor> = moment_tensors(&question, &d, &stage.peak).into_iter().filter(|x| x.part == part).collect();
    moving.iter().for_each(|x| tensor(e, moment, x));
    let (numbers, moved) = sum(moving.iter().map(Tensor::bytes));
    e.line(format!("{moment}, at its fullest: their sum"), numbers, moved, "B");
    terms.push(n(moved));
    let mut words = format!("(layers x micro-batches in flight - layers done) x kept + {moment}");
    if part == Part::Plain {
        words += " + inputs of the step, rotary tables, losses, messages between stages";
        terms.push(n(stage.peak.standing));
    }
    e.line(words, terms.join(" + "), stage.memory.of(purpose), "B");
}

/// Activations outside the experts.
pub(super) fn activations(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    account(plan, stage, Part::Plain, Purpose::Activations, e);
}

/// Routed rows.
pub(super) fn moe(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let d = Dims::new(&plan.run.network, &plan.run.job, &plan.layout);
    let value = stage.memory.of(Purpose::Moe);
    if d.experts.0 == 0.0 {
        return e.line("a dense model routes nothing", n(value), value, "B");
    }
    e.because("Rows are balanced here; with routing skewed s times every row count of the rank's experts is s times larger.");
    e.line("rows sent: tokens / tp x experts per token", format!("{} / {} x {}", n(d.tokens), n(d.tp), n(d.experts.1)), d.sent, "rows");
    e.line("rows that arrive: rows sent x etp", format!("{} x {}", n(d.sent), n(d.etp)), d.routed, "rows");
    account(plan, stage, Part::Moe, Purpose::Moe, e);
}

/// Logits.
pub(super) fn logits(plan: &Plan, stage: &StagePlan, e: &mut Explanation) {
    let run = &plan.run;
    let d = Dims::new(&run.network, &run.job, &plan.layout);
    let value = stage.memory.of(Purpose::Logits);
    let question = Question { network: &run.network, job: &run.job, layout: &plan.layout, overheads: run.overheads };
    let moving = moment_tensors(&question, &d, &stage.peak);
    match moving.iter().find(|x| x.part == Part::Logits) {
        Some(x) => tensor(e, "in the loss", x),
        None if stage.stage.last => e.line("none at the peak, which is at another moment", n(value), value, "B"),
        None => e.line("the head is on another stage", n(value), value, "B"),
    }
}
