//! A run: everything that lives from its first step to its last.

use crate::events::Loading;
use crate::host::OnHost;
use crate::layout::Layout;
use crate::precision::{Precision, dtype_of};
use crate::setup::{self, Prepared, Source};
use crate::share::loading;
use crate::state::RunState;
use crate::step::Trainer;
use crate::together::{self, Resumed, Together};
use crate::{Error, Result, lr::LearningRate, run_dir};
use std::{
    path::Path,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};
use temper_checkpoint::store::{Committed, on_first};
use temper_checkpoint::{Checkpoint, ExportOptions, Saved, Sidecar, Store};
use temper_comm::{Comm, Solo, World};
use temper_config::{Config, Resolved};
use temper_data::{ChatTemplate, Loader, Masker, MicroBatch, Report, Tokenizer};
use temper_tensor::Ops;

/// Where a run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// At step 1.
    New,
    /// After the newest good checkpoint.
    Latest,
    /// After the checkpoint of this step.
    Step(usize),
}

/// A checkpoint that is on disk to stay.
pub struct CheckpointSaved {
    /// Its step.
    pub step: usize,
    /// Its folder.
    pub path: String,
    /// Its size.
    pub bytes: u64,
    /// From the beginning of its save.
    pub took: Duration,
    /// Of that, how long training stood still, where it did not for all of it.
    pub paused: Option<Duration>,
    /// What else the user should know.
    pub notices: Vec<String>,
}

/// A run ready to train.
pub struct Run {
    /// The configuration.
    pub resolved: Resolved,
    /// When the program started.
    pub started: Instant,
    /// How what the run begins with came from disk; nothing when it was drawn.
    pub loaded: Option<Loading>,
    /// Keeps other jobs out of the run folder, once it is taken; rank 0 holds it for all.
    lock: Option<std::fs::File>,
    /// Where it begins.
    begin: Begin,
    /// The step of the checkpoint that it goes on from.
    pub resumed_from: Option<usize>,
    /// Set from outside to end the run after the step under way, saved: the trainer's.
    pub stop: Arc<AtomicBool>,
    /// Where the model comes from.
    pub source: Source,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
    /// The token that ends an assistant turn in this template, which chat training teaches.
    pub turn_end: Option<u32>,
    /// The batches.
    pub loader: Loader,
    /// What the data consists of and what was left out.
    pub report: Report,
    /// Held-out batches.
    pub eval: Vec<MicroBatch>,
    /// How the ranks divide the work.
    pub layout: Layout,
    /// Weights, gradients, moments.
    pub trainer: Trainer,
    /// Learning rate by step.
    pub schedule: LearningRate,
    /// What a checkpoint records.
    pub state: RunState,
    /// Where checkpoints go.
    pub store: Arc<Store>,
    /// With other ranks, what it takes to save and load with them.
    together: Option<Together>,
    /// Whether a save removes old checkpoints: not while the steps are bad.
    pub prunes: bool,
    /// Things to tell the user once events flow.
    pub notices: Vec<String>,
}

impl Run {
    /// Reads and checks everything. Nothing is written: [`Run::take_folder`] does that, when the caller has nothing more to check.
    pub fn open(mut resolved: Resolved, begin: Begin, ops: Arc<dyn Ops>, world: &dyn World, started: Instant) -> Result<Run> {
        let precision = Precision::choose(&mut resolved, &*ops)?;
        let config = &resolved.config;
        run_dir::check(&config.log.dir)?;
        let source = setup::find_source(&resolved)?;
        let Prepared { source, tokenizer, template, dataset } = setup::prepare(&resolved, source)?;
        dataset.ensure_trainable()?;
        let loader = dataset.train_plan(&config.train);
        let eval = dataset.eval_batches(config.train.micro_batch, config.train.eval_sequences);
        let mut notices = resolved.notices.clone();
        notices.extend(data_notices(dataset.report()));
        notices.extend(no_evaluation(config, &eval)?);
        notices.extend(beyond_positions(config, &source, dataset.report()));

        let steps = total_steps(&loader, dataset.report())?;
        let layout = Layout::new(&config.parallel, world.size(), source.arch.moe.is_some())?;
        let ranks = layout.ranks(world, &source.arch)?;
        let portion = layout.portion(&source.arch, &ranks)?;
        setup::announce_attention(&*ops, &portion.seat.arch(&source.arch)?, precision, &loader.batch(0));
        let longest = longest(config, dataset.report(), &eval);
        let mut trainer = setup::trainer(config, &source, (ranks, &portion), precision, longest, ops)?;
        notices.extend(source.arch.notices.iter().cloned());
        let mut state = RunState::new(config, &source, dataset.fingerprint(), steps, &layout);
        let store = Arc::new(Store::new(&config.log.dir));
        let together = Together::new(world, store.clone())?;
        let mut resumed_from = None;
        let loaded = if begin == Begin::New {
            let (loaded, said) = setup::begin(&mut trainer, config, &source)?;
            notices.extend(said);
            loaded
        } else {
            let comm = together.as_ref().map_or(&Solo as &dyn Comm, Together::comm);
            store.assure_shared(comm)?;
            let found = together::load(&store, comm, &mut trainer, begin)?;
            let Resumed { checkpoint, loaded, notices: said } = found.ok_or_else(|| no_checkpoint(&store))?;
            notices.extend(said);
            state = going_on(&checkpoint, state, &mut notices)?;
            trainer.optimizer.updates = state.updates;
            resumed_from = Some(state.step);
            Some(loaded)
        };
        let loaded = loaded.map(|traffic| loading(traffic, &trainer)).transpose()?;
        let schedule = LearningRate::new(&config.optim, steps);
        let report = dataset.report().clone();
        let masker = Masker::new(template.clone(), config.data.loss, tokenizer.added_tokens());
        let turn_end = masker.terminator().and_then(|t| tokenizer.id_of(t.trim_end()));
        Ok(Run {
            started,
            loaded,
            lock: None,
            begin,
            resumed_from,
            layout,
            stop: trainer.stop.clone(),
            report,
            source,
            tokenizer,
            template,
            turn_end,
            loader,
            eval,
            trainer,
            schedule,
            state,
            store,
            together,
            prunes: true,
            notices,
            resolved,
        })
    }

    /// Makes the run folder and keeps other jobs out of it; an earlier run that lies there is moved aside. Every rank calls this.
    ///
    /// # Errors
    /// When the folder cannot be made, another job trains in it, or not every rank sees it.
    pub fn take_folder(&mut self) -> Result<()> {
        let dir = self.dir().to_path_buf();
        // The run folder is the first rank's business.
        if self.trainer.ranks.mesh.rank == 0 {
            if self.begin == Begin::New
                && let Some(old) = run_dir::start(&dir, &inputs(&self.resolved, &self.source))?
            {
                self.notices.push(format!("{} held an earlier run, which is now {}", dir.display(), old.display()));
            }
            self.lock = Some(run_dir::lock(&dir)?);
            self.leave_later_steps()?;
            run_dir::write_config(&dir, &self.resolved)?;
        }
        if let (Some(together), Begin::New) = (&self.together, self.begin) {
            self.store.assure_shared(together.comm())?;
        }
        Ok(())
    }

    /// A run that goes on from an earlier step than its newest leaves what it did after that step: those checkpoints are not its past.
    fn leave_later_steps(&mut self) -> Result<()> {
        let Some(from) = self.resumed_from else { return Ok(()) };
        if let Some((aside, steps)) = self.store.set_aside_after(from)? {
            let steps: Vec<String> = steps.iter().map(usize::to_string).collect();
            self.notices.push(format!(
                "the run goes on from step {from}: its checkpoints of later steps ({}) are now in {}",
                steps.join(", "),
                aside.display()
            ));
        }
        Ok(())
    }

    /// The configuration's values.
    pub fn config(&self) -> &Config {
        &self.resolved.config
    }

    /// The run folder.
    pub fn dir(&self) -> &Path {
        &self.config().log.dir
    }

    /// Saves a checkpoint of the present state. Alone, it is committed when this returns; with other ranks that happens beside training.
    /// Returns what was committed meanwhile.
    pub fn save(&mut self) -> Result<Option<CheckpointSaved>> {
        let sidecar = self.sidecar();
        if let Some(together) = &mut self.together {
            let before = together.save(&self.trainer, &self.state, sidecar)?;
            return before.map(|committed| self.committed(committed)).transpose();
        }
        let clock = Instant::now();
        let t = &self.trainer;
        let weights = t.masters()?;
        let m = OnHost::new(&*t.ops, t.optimizer.exp_avg.iter())?;
        let v = OnHost::new(&*t.ops, t.optimizer.exp_avg_sq.iter())?;
        let state = serde_json::to_value(&self.state).map_err(|e| Error::Input(format!("checkpoint state: {e}")))?;
        let saved = self.store.save(self.state.step, &t.model.params, &weights.views(), &m.views(), &v.views(), &state, &sidecar)?;
        Ok(Some(self.kept(saved, clock.elapsed(), None)?))
    }

    /// What became of a save beside training: with `wait` of any that is under way, else if it is done.
    pub fn saved(&mut self, wait: bool) -> Result<Option<CheckpointSaved>> {
        let Some(together) = &mut self.together else { return Ok(None) };
        let done = if wait { together.wait()? } else { together.poll()? };
        done.map(|committed| self.committed(committed)).transpose()
    }

    fn committed(&self, done: Committed) -> Result<CheckpointSaved> {
        self.kept(done.saved, done.took, Some(done.paused))
    }

    /// Removes the checkpoints that are no longer wanted, now that there is another.
    fn kept(&self, saved: Saved, took: Duration, paused: Option<Duration>) -> Result<CheckpointSaved> {
        let keep = &self.config().checkpoint;
        let first = self.trainer.ranks.mesh.rank == 0;
        let notices = if first && self.prunes { self.store.prune(keep.keep_last, keep.keep_every)? } else { Vec::new() };
        Ok(CheckpointSaved { step: saved.step, path: saved.path.display().to_string(), bytes: saved.bytes, took, paused, notices })
    }

    /// Writes the weights as a Hugging Face folder, `hf/` of the run folder; unless `again`, one that is there stays. Every rank calls this:
    /// of several none has the whole model, and the first exports the last checkpoint.
    pub fn export(&self, again: bool) -> Result<()> {
        let out = self.dir().join("hf");
        let dtype = self.config().checkpoint.export_dtype.map(dtype_of);
        let options = ExportOptions { dtype, overwrite: true, ..ExportOptions::default() };
        let whole = self.together.is_none() && (again || !out.exists());
        let weights = if whole { Some(self.trainer.masters()?) } else { None };
        self.on_first(|| match &weights {
            _ if out.exists() && !again => Ok(()),
            Some(weights) => temper_checkpoint::export(&out, &self.trainer.model.params, &weights.views(), &self.sidecar(), &options),
            None => temper_checkpoint::export_checkpoint(&self.store.step_dir(self.state.step), &out, &options).map(|_| ()),
        })?;
        Ok(())
    }

    /// Does something on the first rank while the others wait, however long it takes. Every rank calls this; nothing on the others.
    ///
    /// # Errors
    /// The first rank's, on all of them.
    pub fn on_first<T>(&self, work: impl FnOnce() -> temper_checkpoint::Result<T>) -> Result<Option<T>> {
        Ok(match &self.together {
            Some(together) => on_first(together.comm(), work)?,
            None => Some(work()?),
        })
    }

    /// The files beside the weights that make a folder a model, and the end-of-turn token that chat training taught.
    fn sidecar(&self) -> Sidecar {
        Sidecar {
            model_dir: self.source.model_dir.clone(),
            tokenizer_dir: self.source.tokenizer_dir.clone(),
            extra_eos: self.turn_end.into_iter().collect(),
        }
    }
}

/// The files and folders that a run reads.
fn inputs<'a>(resolved: &'a Resolved, source: &'a Source) -> Vec<&'a Path> {
    let data = &resolved.config.data;
    let files = data.train.iter().chain(&data.eval).map(|s| s.path.as_path());
    [resolved.origin.as_path(), &source.model_dir, &source.tokenizer_dir].into_iter().chain(files).collect()
}

/// Steps of the whole run.
fn total_steps(loader: &Loader, report: &Report) -> Result<usize> {
    match loader.total_steps() {
        0 => Err(Error::Input(format!(
            "train.epochs: {} samples at these source weights make no step at all. Raise train.epochs or the weights in data.train, or give train.steps",
            report.kept
        ))),
        steps => Ok(steps),
    }
}

/// What was left out of the data, with counts: nothing is dropped in silence.
fn data_notices(r: &Report) -> Vec<String> {
    let cut = &r.cut;
    let counted = [
        (r.bad_rows, "bad rows left out"),
        (cut.dropped_over_long, "over-long samples dropped"),
        (cut.truncated, "over-long samples truncated to data.seq_len"),
        (cut.split, "over-long samples split"),
        (cut.dropped_no_trained_token, "samples dropped because no token of theirs is trained"),
    ];
    let mut notices: Vec<String> = counted.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    notices.extend(r.bad_examples().take(5).map(|bad| format!("bad row {bad}")));
    notices.extend(r.notices.iter().cloned());
    notices
}

/// Evaluation was asked for and there is nothing to evaluate: files must hold something, a share may round to nothing.
fn no_evaluation(config: &Config, eval: &[MicroBatch]) -> Result<Option<String>> {
    if !eval.is_empty() || (config.data.eval.is_empty() && config.data.eval_split == 0.0) {
        return Ok(None);
    }
    if config.data.eval.is_empty() {
        return Ok(Some(format!("data.eval_split = {} holds no sample out: there is no evaluation", config.data.eval_split)));
    }
    let seq_len = config.data.seq_len;
    Err(Error::Input(format!(
        "data.eval: no token of these files is trained at data.seq_len = {seq_len}, so there is nothing to evaluate. Correct the files or remove the key"
    )))
}

/// Tokens of the longest document that will be trained or evaluated on.
fn longest(config: &Config, report: &Report, eval: &[MicroBatch]) -> usize {
    let held_out = eval.iter().flat_map(|m| m.positions.iter()).max().map_or(0, |p| *p as usize + 1);
    config.data.seq_len.min(report.lengths.max as usize).max(held_out)
}

/// Samples longer than what the model was made for are trained on, but the user should know.
fn beyond_positions(config: &Config, source: &Source, report: &Report) -> Option<String> {
    let longest = config.data.seq_len.min(report.lengths.max as usize);
    let made_for = source.arch.max_positions;
    (longest > made_for).then(|| {
        format!("the longest sample has {longest} tokens, the model was made for {made_for} (max_position_embeddings); lower data.seq_len to keep within")
    })
}

fn no_checkpoint(store: &Store) -> Error {
    let earlier = store.dir().parent().and_then(run_dir::earlier_with_checkpoints);
    let hint = earlier.map(|dir| format!(", or look into {}, an earlier run that has some (--set log.dir=...)", dir.display()));
    let hint = hint.unwrap_or_default();
    Error::Input(format!("{}: no checkpoint to resume from. Run without --resume to start{hint}", store.dir().display()))
}

/// The state of a checkpoint, if the run may go on from it.
fn going_on(checkpoint: &Checkpoint, planned: RunState, notices: &mut Vec<String>) -> Result<RunState> {
    let path = checkpoint.path();
    let mut state: RunState = serde_json::from_value(checkpoint.state().clone())
        .map_err(|e| Error::Input(format!("{}: state.json is not a training state: {e}", path.display())))?;
    let conflicts = state.conflicts(&planned);
    if !conflicts.is_empty() {
        return Err(Error::Input(format!(
            "{}: cannot go on from this checkpoint: {}. Restore these, or start a new run without --resume (to train further on other data, set model.path to this run's export)",
            path.display(),
            conflicts.join("; ")
        )));
    }
    notices.extend(state.told(&planned));
    let layout = match (state.layout.as_str(), planned.layout.as_str()) {
        ("", _) => String::new(),
        (old, new) if old == new => String::new(),
        (old, new) => format!("; its layout was {old}, and is now {new}"),
    };
    notices.push(format!("resumed from {} (step {}){layout}", path.display(), state.step));
    (state.steps, state.layout) = (planned.steps, planned.layout);
    (state.model_dir, state.optim) = (planned.model_dir, planned.optim);
    Ok(state)
}
