//! `temper generate`

use crate::args::Generate;
use crate::exit::BadInput;
use crate::out::{Stdout, say};
use crate::weights;
use std::{
    cell::RefCell,
    io::{self, Write},
    path::Path,
    sync::Arc,
    time::Instant,
};
use temper_checkpoint::{WeightsFolder, resolve_model};
use temper_config::{Arch, LossOn, Template};
use temper_data::{ChatTemplate, Masker, Message, Role, Tokenizer};
use temper_model::{Model, Weights};
use temper_rollout::{Completion, Engine, EngineOptions, Finish, Request, Sampling, end_tokens_in};
use temper_tensor::Ops;

/// Loads the model, continues the text, prints it as it comes.
pub fn run(args: &Generate, ops: Arc<dyn Ops>) -> anyhow::Result<()> {
    let folder = resolve_model(&args.model, Path::new(""), "main", true)?;
    let arch = Arch::from_folder(&folder)?;
    let tokenizer = Tokenizer::load(&folder)?;
    tokenizer.check_model_rows(arch.vocab)?;
    let (prompt, turn_end) = prompt(args, &tokenizer)?;
    let ends = end_tokens_in(&folder, &|t| tokenizer.id_of(t), turn_end.as_deref(), arch.vocab)?;
    let model = Model::new(&arch)?;
    let dtype = args.dtype.map_or(Ok(ops.dtypes()[0]), |d| d.on(&*ops))?;
    weights::must_be_in(&folder)?;
    let (tensors, notices) = WeightsFolder::open(&folder)?.load(&model.params, dtype)?;
    for notice in arch.notices.iter().chain(&notices).chain(&ends.notices) {
        crate::out::tell(format_args!("note: {notice}"));
    }
    let weights = Weights::from_host(&model.params, tensors, dtype, &*ops)?;
    let request = Request {
        sampling: sampling(args, &folder)?,
        max_tokens: args.max_tokens.min(arch.max_positions.saturating_sub(prompt.len()).max(1)),
        end_tokens: ends.ids,
        stop: args.stop.clone(),
        prompt,
    };
    let mut writer = Streamer { json: args.json, failed: None };
    let clock = Instant::now();
    let completion = answer(&*ops, &model, &weights, &tokenizer, !args.special, &request, |text| writer.text(text))?;
    writer.finish()?;
    if args.json {
        print_json(&request, &completion, clock.elapsed().as_secs_f64())?;
    }
    Ok(())
}

/// Continues one request with a model in memory; `on_text` gets the text as it becomes certain.
pub fn answer(
    ops: &dyn Ops,
    model: &Model,
    weights: &Weights,
    tokenizer: &Tokenizer,
    skip_special: bool,
    request: &Request,
    mut on_text: impl FnMut(&str),
) -> anyhow::Result<Completion> {
    let options = EngineOptions::for_requests(std::slice::from_ref(request), &model.arch, 1);
    let failed = RefCell::new(None);
    let decode = |ids: &[u32]| tokenizer.decode(ids, skip_special).map_err(|e| *failed.borrow_mut() = Some(e)).unwrap_or_default();
    let mut engine = Engine::new(ops, model, weights, options)?.with_decoder(decode);
    let mut done = engine.generate_with(std::slice::from_ref(request), |_, output| on_text(&output.text))?;
    drop(engine);
    match (failed.into_inner(), done.pop()) {
        (Some(e), _) => Err(e.into()),
        (None, Some(completion)) => Ok(completion),
        (None, None) => Err(anyhow::anyhow!("the engine returned nothing")),
    }
}

/// The chat template's rendering of one question, ready to be answered, and what ends a turn.
pub fn chat_prompt(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    system: Option<&str>,
    user: &str,
) -> anyhow::Result<(Vec<u32>, Option<String>)> {
    let mut messages: Vec<Message> = system.map(|s| Message::new(Role::System, s)).into_iter().collect();
    messages.push(Message::new(Role::User, user));
    let text = template.render_messages(&messages, None, true).map_err(temper_data::Error::from)?.text;
    let masker = Masker::new(template.clone(), LossOn::Assistant, tokenizer.added_tokens());
    Ok((tokenizer.encode(&text)?.ids, masker.terminator().map(str::to_string)))
}

fn prompt(args: &Generate, tokenizer: &Tokenizer) -> anyhow::Result<(Vec<u32>, Option<String>)> {
    if let Some(text) = &args.prompt {
        return Ok((tokenizer.encode_prompt(text)?, None));
    }
    let mut variables = serde_json::Map::new();
    if args.no_think {
        variables.insert("enable_thinking".into(), false.into());
    }
    let template = ChatTemplate::load(&Template::Model, &variables, tokenizer)?;
    chat_prompt(&template, tokenizer, args.system.as_deref(), args.chat.as_deref().unwrap_or_default())
}

/// What the user asks for, else what generation_config.json recommends, else greedy.
fn sampling(args: &Generate, folder: &Path) -> anyhow::Result<Sampling> {
    let path = folder.join("generation_config.json");
    let file: serde_json::Value = match std::fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| BadInput(format!("{}: {e}", path.display())))?,
        Err(_) => serde_json::Value::Null,
    };
    let samples = file.get("do_sample").and_then(serde_json::Value::as_bool).unwrap_or(false);
    let number = |key: &str| file.get(key).and_then(serde_json::Value::as_f64).filter(|_| samples);
    let sampling = Sampling {
        temperature: args.temperature.or_else(|| number("temperature")).unwrap_or(if samples { 1.0 } else { 0.0 }),
        top_k: args.top_k.or_else(|| number("top_k").map(|k| k as usize)).unwrap_or(0),
        top_p: args.top_p.or_else(|| number("top_p")).unwrap_or(1.0),
        seed: args.seed,
        ..Sampling::default()
    };
    sampling.check().map_err(|e| BadInput(e.to_string()))?;
    Ok(sampling)
}

/// Writes text to stdout as it comes. A write that fails stops the writing, not the generation.
struct Streamer {
    json: bool,
    failed: Option<io::Error>,
}

impl Streamer {
    fn text(&mut self, text: &str) {
        if self.json || self.failed.is_some() || text.is_empty() {
            return;
        }
        self.failed = Stdout.write_all(text.as_bytes()).and_then(|()| Stdout.flush()).err();
    }

    fn finish(self) -> anyhow::Result<()> {
        if let Some(e) = self.failed {
            return Err(e.into());
        }
        if !self.json {
            say("")?;
        }
        Ok(())
    }
}

fn print_json(request: &Request, done: &Completion, seconds: f64) -> io::Result<()> {
    let stopped_by = match &done.finish {
        Finish::EndToken(id) => serde_json::json!(id),
        Finish::StopString(s) => serde_json::json!(s),
        Finish::MaxTokens | Finish::ContextFull => serde_json::Value::Null,
    };
    say(serde_json::json!({
        "text": done.text, "ids": done.tokens, "log_probs": done.log_probs, "finish_reason": done.finish.reason(), "stopped_by": stopped_by,
        "prompt_tokens": request.prompt.len(), "new_tokens": done.tokens.len(), "seconds": seconds,
        "tokens_per_s": done.tokens.len() as f64 / seconds.max(1e-9),
    }))
}
