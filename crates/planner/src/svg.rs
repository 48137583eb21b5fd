//! The picture: for each pipeline stage a stack of what its ranks hold, against the device's memory.
//!
//! Grey text and mid tones that read on light and dark, no scripts, no fonts of its own, nothing outside the file.

use crate::memory::Purpose;
use crate::plan::Plan;
use crate::units::{Unit, bytes};
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 540.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = WIDTH - 210.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = HEIGHT - 64.0;
const GREY: &str = "#868e99";
/// More stages than this are thinned: the first, the last, and some between.
const MOST_BARS: usize = 24;

fn colour(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Weights => "#3b82f6",
        Purpose::Gradients => "#0ea5a4",
        Purpose::Masters => "#8b5cf6",
        Purpose::Moments => "#a78bfa",
        Purpose::Activations => "#f08c00",
        Purpose::Moe => "#e8590c",
        Purpose::Logits => "#e03131",
        Purpose::Communication => "#94a3b8",
        Purpose::Libraries => "#64748b",
        Purpose::Allocator => "#adb5bd",
    }
}

/// The stack of every stage as SVG.
pub fn picture(plan: &Plan) -> String {
    let mut out = String::with_capacity(16 << 10);
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
         font-family=\"system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif\" font-size=\"13\" fill=\"{GREY}\">"
    );
    title(&mut out, plan);
    let most = plan.stages.iter().map(|s| s.skewed.total().max(s.memory.total())).fold(plan.capacity(), f64::max);
    let unit = Unit::of_bytes(most);
    let scale = Scale { unit, top: (unit.of(most) * 1.08).max(1e-3) };
    scale.grid(&mut out);
    bars(&mut out, plan, &scale);
    limit(&mut out, plan, &scale);
    legend(&mut out, plan);
    out.push_str("</svg>\n");
    out
}

struct Scale {
    unit: Unit,
    /// What is at the top edge, in the unit.
    top: f64,
}

impl Scale {
    fn y(&self, bytes: f64) -> f64 {
        self.at(self.unit.of(bytes))
    }

    fn at(&self, value: f64) -> f64 {
        BOTTOM - value / self.top * (BOTTOM - TOP)
    }

    fn grid(&self, out: &mut String) {
        let rough = self.top / 6.0;
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].iter().map(|f| f * magnitude).find(|s| *s >= rough).unwrap_or(rough);
        for i in 0..12 {
            let value = f64::from(i) * step;
            if value > self.top {
                break;
            }
            let y = self.at(value);
            let _ = writeln!(out, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"{GREY}\" stroke-opacity=\"0.22\"/>");
            let label = if step < 1.0 { format!("{value:.2}") } else { format!("{value:.0}") };
            let _ = writeln!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 9.0, y + 4.5);
        }
        let middle = (TOP + BOTTOM) / 2.0;
        let _ = writeln!(
            out,
            "<text transform=\"translate(20 {middle}) rotate(-90)\" text-anchor=\"middle\">{} of a rank</text>",
            self.unit.name
        );
        let across = (LEFT + RIGHT) / 2.0;
        let _ = writeln!(out, "<text x=\"{across}\" y=\"{}\" text-anchor=\"middle\">pipeline stage</text>", HEIGHT - 16.0);
    }
}

fn title(out: &mut String, plan: &Plan) {
    let name = escape(&format!("{} on {} x {}", plan.run.network.name, plan.run.cluster.gpus, plan.run.cluster.device.name));
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"32\" font-size=\"18\" font-weight=\"600\">{name}</text>");
    let verdict = if plan.fits() { "fits" } else { "does not fit" };
    let peak = bytes(plan.heaviest.peak_bytes as f64);
    let layout = plan.layout.told(plan.run.network.arch.moe.is_some());
    let line = format!("{layout} \u{b7} peak {peak} on rank {}: {verdict}", plan.heaviest.rank);
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"56\">{}</text>", escape(&line));
}

fn bars(out: &mut String, plan: &Plan, scale: &Scale) {
    let count = plan.stages.len();
    let every = count.div_ceil(MOST_BARS).max(1);
    let shown: Vec<_> = plan.stages.iter().enumerate().filter(|(i, _)| i % every == 0 || i + 1 == count).map(|(_, s)| s).collect();
    let slot = (RIGHT - LEFT) / shown.len().max(1) as f64;
    let wide = (slot * 0.6).min(110.0);
    for (i, stage) in shown.iter().enumerate() {
        let x = LEFT + slot * (i as f64 + 0.5) - wide / 2.0;
        let mut base = 0.0;
        for (purpose, part) in stage.memory.parts() {
            let (low, high) = (scale.y(base), scale.y(base + part));
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{high:.1}\" width=\"{wide:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{} {}</title></rect>",
                low - high,
                colour(purpose),
                purpose.name(),
                bytes(part)
            );
            base += part;
        }
        let skewed = stage.skewed.total();
        if skewed > base * 1.001 {
            let y = scale.y(skewed);
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{:.1}\" fill=\"none\" stroke=\"{}\" stroke-dasharray=\"4 3\"/>",
                scale.y(base) - y,
                colour(Purpose::Moe)
            );
        }
        let centre = x + wide / 2.0;
        let _ = writeln!(
            out,
            "<text x=\"{centre:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            scale.y(base.max(skewed)) - 6.0,
            bytes(base)
        );
        let _ = writeln!(out, "<text x=\"{centre:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>", BOTTOM + 20.0, stage.stage.index);
    }
}

fn limit(out: &mut String, plan: &Plan, scale: &Scale) {
    let y = scale.y(plan.capacity());
    let _ = writeln!(out, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#e03131\" stroke-width=\"1.6\" stroke-dasharray=\"7 4\"/>");
    // On the line, at its right end: bars stand in the middle of their slots.
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#e03131\">{} of a device</text>",
        RIGHT - 4.0,
        y - 6.0,
        bytes(plan.capacity())
    );
}

fn legend(out: &mut String, plan: &Plan) {
    let mut y = TOP + 40.0;
    let used = |purpose: &Purpose| plan.stages.iter().any(|s| s.memory.of(*purpose) > 0.0);
    let x = RIGHT + 12.0;
    for purpose in Purpose::ALL.into_iter().rev().filter(used) {
        let _ = writeln!(out, "<rect x=\"{x}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{}\"/>", y - 10.5, colour(purpose));
        let part = bytes(plan.heaviest.by_purpose.of(purpose));
        let _ = writeln!(out, "<text x=\"{}\" y=\"{y:.1}\">{} {part}</text>", x + 20.0, purpose.name());
        y += 22.0;
    }
    let _ = writeln!(out, "<text x=\"{x}\" y=\"{y:.1}\" font-size=\"11\">on rank {}</text>", plan.heaviest.rank);
    if plan.layout.ep > 1 {
        let skew = plan.run.job.skew;
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{:.1}\" font-size=\"11\">dashed: routing skewed {skew}x</text>", y + 18.0);
    }
}

fn escape(text: &str) -> String {
    let plain: String = text.chars().filter(|c| !c.is_control()).collect();
    plain.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
