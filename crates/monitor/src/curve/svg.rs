//! The picture: grey text and grid that read on light and dark, no scripts, no fonts of its own, nothing outside the file.

use super::axis::Axis;
use crate::history::{History, Point};
use crate::words::{short, thousands};
use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 540.0;
/// The plot inside its margins.
const LEFT: f64 = 76.0;
const RIGHT: f64 = WIDTH - 28.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = HEIGHT - 52.0;
/// More raw points than this are drawn as the least and the greatest of each pixel column.
const COLUMNS: usize = (RIGHT - LEFT) as usize;

/// Radius of an evaluation's dot.
const DOT: f64 = 3.0;

const GREY: &str = "#868e99";
const BLUE: &str = "#3b82f6";
const ORANGE: &str = "#f08c00";

/// The curve as SVG.
pub(super) fn picture(history: &History, name: &str) -> String {
    let finite: Vec<Point> = history.train.iter().copied().filter(|p| p.value.is_finite()).collect();
    let eval: Vec<Point> = history.eval.iter().copied().filter(|p| p.value.is_finite()).collect();
    let smooth = smoothed(&finite);
    let mut out = String::with_capacity(64 << 10);
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
         font-family=\"system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif\" font-size=\"13\" fill=\"{GREY}\">"
    );
    title(&mut out, history, &smooth, &eval, name);
    match ranges(history, &finite, &smooth, &eval) {
        Some((x, y)) => {
            grid(&mut out, &x, &y);
            let _ = write!(
                out,
                "<clipPath id=\"plot\"><rect x=\"{}\" y=\"{TOP}\" width=\"{}\" height=\"{}\"/></clipPath>\n<g clip-path=\"url(#plot)\" \
                 fill=\"none\" stroke-linejoin=\"round\" stroke-linecap=\"round\">\n",
                LEFT - DOT,
                RIGHT - LEFT + 2.0 * DOT,
                BOTTOM - TOP
            );
            line(&mut out, &envelope(&history.train), &x, &y, &format!("stroke=\"{BLUE}\" stroke-opacity=\"0.35\" stroke-width=\"1.2\""));
            line(&mut out, &thinned(&smooth), &x, &y, &format!("stroke=\"{BLUE}\" stroke-width=\"2.2\""));
            line(&mut out, &thinned(&eval), &x, &y, &format!("stroke=\"{ORANGE}\" stroke-width=\"1.8\" stroke-dasharray=\"5 4\""));
            dots(&mut out, if finite.len() == 1 { &finite } else { &[] }, &x, &y, BLUE);
            dots(&mut out, &thinned(&eval), &x, &y, ORANGE);
            out.push_str("</g>\n");
        }
        None => {
            let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">no finite loss yet</text>", WIDTH / 2.0, HEIGHT / 2.0);
        }
    }
    legend(&mut out, history.train.len() - finite.len(), !eval.is_empty());
    out.push_str("</svg>\n");
    out
}

/// Exponential mean over about a twentieth of the points, corrected for its start.
fn smoothed(points: &[Point]) -> Vec<Point> {
    let window = (points.len() as f64 / 20.0).clamp(1.0, 400.0);
    let keep = 1.0 - 2.0 / (window + 1.0);
    let (mut sum, mut weight) = (0.0, 0.0);
    let mean = |p: &Point| {
        sum = keep * sum + (1.0 - keep) * p.value;
        weight = keep * weight + (1.0 - keep);
        Point { step: p.step, value: sum / weight }
    };
    points.iter().map(mean).collect()
}

/// The axes, or none when there is nothing to show. A few wild raw values may lie outside: they would flatten the rest.
fn ranges(history: &History, finite: &[Point], smooth: &[Point], eval: &[Point]) -> Option<(Axis, Axis)> {
    let mut shown: Vec<f64> = smooth.iter().chain(eval).map(|p| p.value).collect();
    let mut raw: Vec<f64> = finite.iter().map(|p| p.value).collect();
    raw.sort_unstable_by(f64::total_cmp);
    let cut = raw.len() / 200;
    shown.extend(raw.get(cut..raw.len() - cut).into_iter().flatten());
    let low = shown.iter().copied().reduce(f64::min)?;
    let high = shown.iter().copied().reduce(f64::max)?;
    let pad = ((high - low) * 0.06).max(high.abs().max(low.abs()) * 1e-3).max(1e-9);
    // A loss is not negative: an axis that would only reach below zero by its margin starts at zero.
    let bottom = if low >= 0.0 { (low - pad).max(0.0) } else { low - pad };
    let steps = || history.train.iter().chain(&history.eval).map(|p| p.step);
    let (first, last) = (steps().min()? as f64, steps().max()? as f64);
    let y = Axis::new(bottom, high + pad, BOTTOM, TOP, 6.0);
    Some((Axis::new(first, last.max(first + 1.0), LEFT, RIGHT, 8.0).whole(), y))
}

fn title(out: &mut String, history: &History, smooth: &[Point], eval: &[Point], name: &str) {
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"32\" font-size=\"18\" font-weight=\"600\">{}</text>", escape(name));
    let mut parts = Vec::new();
    if let Some(last) = history.train.last() {
        let of = if history.steps > 0 { format!(" of {}", thousands(history.steps as u64)) } else { String::new() };
        parts.push(format!("step {}{of}", thousands(last.step as u64)));
        parts.push(format!("loss {}", if last.value.is_finite() { short(last.value, 4) } else { "not finite".to_string() }));
    }
    if let Some(last) = smooth.last() {
        parts.push(format!("smoothed {}", short(last.value, 4)));
    }
    if let Some(last) = eval.last() {
        parts.push(format!("evaluation {} (perplexity {})", short(last.value, 4), short(last.value.exp(), 3)));
    }
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"56\">{}</text>", parts.join(" \u{b7} "));
}

fn grid(out: &mut String, x: &Axis, y: &Axis) {
    let _ = writeln!(out, "<g stroke=\"{GREY}\" stroke-opacity=\"0.22\">");
    for (value, _) in y.ticks() {
        let _ = writeln!(out, "<path d=\"M{LEFT} {0:.1}H{RIGHT}\"/>", y.pixel(value));
    }
    let _ = writeln!(out, "<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\" fill=\"none\" stroke-opacity=\"0.7\"/>\n</g>");
    for (value, label) in y.ticks() {
        let _ = writeln!(out, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 9.0, y.pixel(value) + 4.5);
    }
    for (value, label) in x.ticks() {
        let at = x.pixel(value);
        let _ = writeln!(out, "<path d=\"M{at:.1} {BOTTOM}v5\" stroke=\"{GREY}\"/>");
        let _ = writeln!(out, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", BOTTOM + 20.0);
    }
    let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>", (LEFT + RIGHT) / 2.0, HEIGHT - 12.0);
    let middle = (TOP + BOTTOM) / 2.0;
    let _ = writeln!(out, "<text transform=\"translate(20 {middle}) rotate(-90)\" text-anchor=\"middle\">loss per trained token</text>");
}

/// A line through the points, broken where a value is not finite.
fn line(out: &mut String, points: &[Point], x: &Axis, y: &Axis, style: &str) {
    let mut path = String::new();
    let mut pen_down = false;
    for p in points {
        if p.value.is_finite() {
            // A far value stays a number that renderers can clip.
            let down = y.pixel(p.value).clamp(-1e4, 1e4);
            let _ = write!(path, "{}{:.1} {down:.1}", if pen_down { 'L' } else { 'M' }, x.pixel(p.step as f64));
        }
        pen_down = p.value.is_finite();
    }
    if !path.is_empty() {
        let _ = writeln!(out, "<path d=\"{path}\" {style}/>");
    }
}

fn dots(out: &mut String, points: &[Point], x: &Axis, y: &Axis, colour: &str) {
    for p in points {
        let (across, down) = (x.pixel(p.step as f64), y.pixel(p.value));
        let _ = writeln!(out, "<circle cx=\"{across:.1}\" cy=\"{down:.1}\" r=\"{DOT}\" fill=\"{colour}\"/>");
    }
}

/// Raw points, or when they are too many the least and greatest of each pixel column.
fn envelope(points: &[Point]) -> Vec<Point> {
    if points.len() <= 2 * COLUMNS {
        return points.to_vec();
    }
    let mut out = Vec::with_capacity(2 * COLUMNS + 2);
    for column in points.chunks(points.len().div_ceil(COLUMNS)) {
        let finite = || column.iter().filter(|p| p.value.is_finite());
        let least = finite().min_by(|a, b| a.value.total_cmp(&b.value));
        let greatest = finite().max_by(|a, b| a.value.total_cmp(&b.value));
        match (least, greatest) {
            (Some(a), Some(b)) => out.extend(if a.step <= b.step { [*a, *b] } else { [*b, *a] }),
            // A whole column without a finite value breaks the line.
            _ => out.extend(column.first()),
        }
    }
    out
}

/// At most a point for each pixel column, the last one always.
fn thinned(points: &[Point]) -> Vec<Point> {
    let every = points.len().div_ceil(COLUMNS).max(1);
    let mut out: Vec<Point> = points.iter().step_by(every).copied().collect();
    if let (Some(last), Some(kept)) = (points.last(), out.last())
        && last.step != kept.step
    {
        out.push(*last);
    }
    out
}

/// Top right, on the line of the title.
fn legend(out: &mut String, not_finite: usize, eval: bool) {
    let mut entries = vec![(BLUE, "0.35", "each step".to_string()), (BLUE, "1", "smoothed".to_string())];
    if eval {
        entries.push((ORANGE, "1", "evaluation".to_string()));
    }
    if not_finite > 0 {
        entries.push(("none", "1", format!("{} not finite", thousands(not_finite as u64))));
    }
    // About 8 pixels a letter at this size, rather too much than too little.
    let width = |label: &str| 8.0 * label.len() as f64 + 44.0;
    let mut left = RIGHT + 16.0 - entries.iter().map(|(.., label)| width(label)).sum::<f64>();
    for (colour, opacity, label) in &entries {
        let _ = writeln!(out, "<path d=\"M{left} 27.5h20\" stroke=\"{colour}\" stroke-opacity=\"{opacity}\" stroke-width=\"2.5\"/>");
        let _ = writeln!(out, "<text x=\"{}\" y=\"32\">{label}</text>", left + 26.0);
        left += width(label);
    }
}

fn escape(text: &str) -> String {
    let plain: String = text.chars().filter(|c| !c.is_control()).collect();
    plain.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: impl IntoIterator<Item = f64>) -> Vec<Point> {
        values.into_iter().enumerate().map(|(i, value)| Point { step: i + 1, value }).collect()
    }

    /// The picture must hold only finite numbers, and balanced tags.
    fn checked(history: &History) -> String {
        let svg = picture(history, "a <run> & \"more\"");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        assert!(svg.contains("a &lt;run&gt; &amp; &quot;more&quot;"));
        assert_eq!(svg.matches("<g").count(), svg.matches("</g>").count());
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        svg
    }

    #[test]
    fn nothing_one_point_and_nan_are_drawn() {
        assert!(checked(&History::default()).contains("no finite loss yet"));
        let nan = History { train: points([f64::NAN]), ..History::default() };
        assert!(checked(&nan).contains("no finite loss yet") && checked(&nan).contains("1 not finite"));
        let one = History { train: points([2.5]), eval: vec![], steps: 10 };
        let svg = checked(&one);
        assert!(svg.contains("<circle") && svg.contains("step 1 of 10") && svg.contains("loss 2.5000"), "{svg}");
        for same in [0.0, -3.0, 1e-300, 1e300] {
            checked(&History { train: points([same; 3]), ..History::default() });
        }
    }

    #[test]
    fn a_gap_breaks_the_line() {
        let history = History { train: points([3.0, 2.0, f64::NAN, 1.5, 1.0]), ..History::default() };
        let svg = checked(&history);
        let raw = svg.lines().find(|l| l.contains("stroke-opacity=\"0.35\" stroke-width=\"1.2\"")).unwrap();
        assert_eq!(raw.matches('M').count(), 2, "{raw}");
    }

    #[test]
    fn a_million_points_make_a_small_file() {
        let values = (0..1_000_000).map(|i| 1.0 + 5.0 / (1.0 + i as f64 / 1e4) + (i % 7) as f64 * 0.01);
        let history = History { train: points(values), eval: points([1.0; 5000]), steps: 1_000_000 };
        let svg = checked(&history);
        assert!(svg.len() < 200 << 10, "{} bytes", svg.len());
        assert!(svg.contains("step 1,000,000 of 1,000,000"));
    }

    #[test]
    fn thinning_keeps_extremes_and_the_last_point() {
        let mut values = vec![1.0; 100_000];
        values[54_321] = 9.0;
        values[12_345] = -9.0;
        let all = points(values);
        let drawn = envelope(&all);
        assert!(drawn.len() <= 2 * COLUMNS);
        assert!(drawn.windows(2).all(|w| w[0].step <= w[1].step));
        for value in [9.0, -9.0] {
            assert!(drawn.iter().any(|p| p.value == value));
        }
        assert_eq!(thinned(&all).last(), all.last());
    }

    #[test]
    fn smoothing_is_a_mean_without_a_bias_at_its_start() {
        assert!(smoothed(&points([2.0; 100])).iter().all(|p| (p.value - 2.0).abs() < 1e-12));
        // 40 points: window 2, weights 2/3 and 1/3 of what came before.
        let two = smoothed(&points((0..40).map(|i| if i == 0 { 3.0 } else { 0.0 })));
        assert!((two[1].value - 0.75).abs() < 1e-12, "{}", two[1].value);
        // Few points are not smoothed at all.
        assert_eq!(smoothed(&points([3.0, 1.0])), points([3.0, 1.0]));
    }

    #[test]
    fn one_wild_step_does_not_flatten_the_curve() {
        let mut values: Vec<f64> = (0..1000).map(|i| 2.0 - f64::from(i) * 1e-3).collect();
        values[700] = 1e9;
        let history = History { train: points(values), ..History::default() };
        let (_, y) = ranges(&history, &history.train, &[], &[]).unwrap();
        assert!(y.pixel(1.0) > TOP && y.pixel(2.0) < y.pixel(1.0) - 300.0);
    }
}
