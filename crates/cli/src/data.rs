//! `temper data`

use crate::args::{BuildRoleplay, Data, Preview, Stats};
use crate::exit::BadInput;
use crate::out::{Stdout, say, say_json};
use std::{
    io::{self, BufWriter, IsTerminal, Write},
    ops::ControlFlow,
};
use temper_config::{Config, Resolved};
use temper_data::{ChatTemplate, Dataset, PreviewItem, PreviewLine, RoleplayOptions, Tokenizer, preview, preview_batch, runs};
use temper_train::setup::find_source;

/// Samples shown to a person who does not say how many.
const SHOWN: usize = 5;

/// Runs one of the data commands.
pub fn run(args: &Data) -> anyhow::Result<()> {
    match args {
        Data::Preview(a) => show(a),
        Data::Stats(a) => stats(a),
        Data::BuildRoleplay(a) => build_roleplay(a),
    }
}

struct Input {
    resolved: Resolved,
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

fn input(config: &std::path::Path, sets: &[String]) -> anyhow::Result<Input> {
    let resolved = Config::load(config, sets)?;
    let source = find_source(&resolved)?;
    let tokenizer = Tokenizer::load(&source.tokenizer_dir)?;
    let data = &resolved.config.data;
    let template = ChatTemplate::load(&data.template, &data.template_args, &tokenizer)?;
    for notice in &resolved.notices {
        crate::out::tell(format_args!("note: {notice}"));
    }
    Ok(Input { resolved, tokenizer, template })
}

fn show(args: &Preview) -> anyhow::Result<()> {
    let input = input(&args.config, &args.sets)?;
    let mut out = Printer { tokenizer: &input.tokenizer, json: args.json, out: BufWriter::new(Stdout) };
    if let Some(step) = args.step {
        return show_step(&input, step, &mut out);
    }
    let limit = args.num.unwrap_or(if args.json { 0 } else { SHOWN });
    let (mut shown, mut bad, mut dropped) = (0, 0, 0);
    let mut failed = Ok(());
    preview(&input.resolved.config.data, &input.tokenizer, &input.template, &mut |item| {
        match item {
            PreviewItem::Line(line) => {
                failed = out.line(&line);
                shown += 1;
            }
            PreviewItem::Bad(row) => {
                crate::out::tell(format_args!("bad row: {row}"));
                bad += 1;
            }
            PreviewItem::Dropped(row) => {
                crate::out::tell(format_args!("{row}"));
                dropped += 1;
            }
        }
        if failed.is_err() || (limit > 0 && shown >= limit) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    failed?;
    out.out.flush()?;
    crate::out::tell(format_args!("{shown} shown, {bad} bad, {dropped} dropped"));
    Ok(())
}

/// The batch of a training step, as it is trained.
fn show_step(input: &Input, step: usize, out: &mut Printer<impl Write>) -> anyhow::Result<()> {
    let config = &input.resolved.config;
    let dataset = Dataset::build(&config.data, &input.tokenizer, &input.template)?;
    dataset.ensure_trainable()?;
    let loader = dataset.train_plan(&config.train);
    let steps = loader.total_steps();
    if step == 0 || step > steps {
        return Err(BadInput(format!("--step {step}: the run has steps 1 to {steps}")).into());
    }
    for (number, micro) in loader.batch(step - 1).micro.iter().enumerate() {
        for line in preview_batch(&config.data, &input.tokenizer, micro, number)? {
            out.line(&line)?;
        }
    }
    Ok(out.out.flush()?)
}

struct Printer<'a, W: Write> {
    tokenizer: &'a Tokenizer,
    json: bool,
    out: W,
}

impl<W: Write> Printer<'_, W> {
    fn line(&mut self, line: &PreviewLine) -> anyhow::Result<()> {
        if self.json {
            serde_json::to_writer(&mut self.out, line).map_err(io::Error::from)?;
            return Ok(writeln!(self.out)?);
        }
        let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let place = line.batch.map(|b| format!("  micro-batch {}", b + 1)).unwrap_or_default();
        let piece = if line.piece > 0 { format!(" piece {}", line.piece + 1) } else { String::new() };
        let (file, row, tokens) = (line.file.display(), line.row, line.input_ids.len());
        let cut = line.cut_from.map(|all| format!(" of {all} (cut at data.seq_len)")).unwrap_or_default();
        writeln!(self.out, "── {file}:{row}{piece}{place}  {tokens} tokens{cut}, {} trained", line.trained_tokens)?;
        for run in runs(self.tokenizer, line)? {
            match (run.trained, colour) {
                (true, true) => write!(self.out, "\x1b[1;32m{}\x1b[0m", run.text)?,
                (false, true) => write!(self.out, "\x1b[2m{}\x1b[0m", run.text)?,
                (true, false) => write!(self.out, "⟦{}⟧", run.text)?,
                (false, false) => write!(self.out, "{}", run.text)?,
            }
        }
        Ok(writeln!(self.out)?)
    }
}

fn stats(args: &Stats) -> anyhow::Result<()> {
    let input = input(&args.config, &args.sets)?;
    let dataset = Dataset::build(&input.resolved.config.data, &input.tokenizer, &input.template)?;
    Ok(if args.json { say_json(dataset.report()) } else { say(dataset.report().table().trim_end()) }?)
}

fn build_roleplay(args: &BuildRoleplay) -> anyhow::Result<()> {
    let limit = |n: usize| (n > 0).then_some(n);
    let options = RoleplayOptions {
        min_overall: args.min_overall,
        min_basics: args.min_basics,
        min_logic: args.min_logic,
        include_models: args.models.clone(),
        exclude_models: args.exclude_models.clone(),
        max_per_seed: limit(args.per_seed),
        max_turns: limit(args.max_turns),
        validation: args.val,
        seed: args.seed,
    };
    let report = temper_data::build_roleplay(&args.input, &args.output, &options)?;
    Ok(if args.json { say_json(&report) } else { say(report) }?)
}
