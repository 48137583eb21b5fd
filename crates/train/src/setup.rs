//! From a configuration to everything a run needs. Nothing is written here: a fault of the input leaves no trace.

use crate::precision::Precision;
use crate::step::{Settings, Trainer};
use crate::{Error, Result};
use std::{path::PathBuf, sync::Arc};
use temper_checkpoint::{Traffic, WeightsFolder, resolve_model};
use temper_config::{Arch, AuxLoss, Config, InitFrom, Resolved};
use temper_data::{ChatTemplate, Dataset, MicroBatch, StepBatch, Tokenizer};
use temper_model::{Grads, Model, Portion, Ranks, Recompute, RopeTables, Weights, chunk_rows, declare};
use temper_parallel::{AdamWConfig, Buckets, Optimizer};
use temper_tensor::{AttentionSizes, Balance, Ops, Purpose};

/// A model folder and what was read from it.
pub struct Source {
    /// Folder of config.json and weights.
    pub model_dir: PathBuf,
    /// Folder of the tokenizer files.
    pub tokenizer_dir: PathBuf,
    /// The architecture.
    pub arch: Arch,
}

/// Data ready to be trained on.
pub struct Prepared {
    /// Where the model comes from.
    pub source: Source,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
    /// The samples.
    pub dataset: Dataset,
}

/// Finds the model (on disk or on the Hub) and its tokenizer's folder.
pub fn find_source(resolved: &Resolved) -> Result<Source> {
    let (config, base) = (&resolved.config.model, resolved.origin.parent().unwrap_or(std::path::Path::new("")));
    let weights_wanted = config.init == InitFrom::Pretrained;
    let model_dir = resolve_model(&config.path, base, &config.revision, weights_wanted)?;
    let tokenizer_dir = match &config.tokenizer {
        Some(spec) => resolve_model(spec, base, &config.revision, false)?,
        None => model_dir.clone(),
    };
    let arch = Arch::from_folder(&model_dir)?;
    Ok(Source { model_dir, tokenizer_dir, arch })
}

/// Reads, renders, tokenises and masks the data.
pub fn prepare(resolved: &Resolved, source: Source) -> Result<Prepared> {
    let tokenizer = Tokenizer::load(&source.tokenizer_dir)?;
    tokenizer.check_model_rows(source.arch.vocab)?;
    let template = ChatTemplate::load(&resolved.config.data.template, &resolved.config.data.template_args, &tokenizer)?;
    let dataset = Dataset::build(&resolved.config.data, &tokenizer, &template)?;
    Ok(Prepared { source, tokenizer, template, dataset })
}

/// Tells the backend which attention a step asks for, so that it gets ready while the weights are read.
pub(crate) fn announce_attention(ops: &dyn Ops, arch: &Arch, precision: Precision, batch: &StepBatch) {
    let of = |micro: &MicroBatch| AttentionSizes {
        dtype: precision.weights,
        tokens: micro.ids.len(),
        sequences: micro.cu_seqlens.len().saturating_sub(1),
        longest: micro.cu_seqlens.windows(2).map(|w| (w[1] - w[0]).max(0) as usize).max().unwrap_or(0),
        q_heads: arch.heads,
        k_heads: arch.kv_heads,
        head: arch.head_dim,
    };
    ops.prepare_attention(&batch.micro.iter().map(of).collect::<Vec<_>>());
}

/// Reads the weights of the source, of which every rank takes what it holds; or draws them. Returns what was read, and notices about the
/// folder.
pub fn begin(trainer: &mut Trainer, config: &Config, source: &Source) -> Result<(Option<Traffic>, Vec<String>)> {
    if config.model.init == InitFrom::Random {
        trainer.draw(config.train.seed)?;
        return Ok((None, Vec::new()));
    }
    let folder = WeightsFolder::open(&source.model_dir)?;
    let notices = folder.check(&declare(&source.arch))?;
    let traffic = trainer.fill(false, &|slots| folder.read(slots))?;
    Ok((Some(traffic), notices))
}

/// Allocates what lives from the first step to the last: weights (unspecified as yet), gradients and moments.
pub fn trainer(
    config: &Config,
    source: &Source,
    (ranks, portion): (Ranks, &Portion),
    precision: Precision,
    longest: usize,
    ops: Arc<dyn Ops>,
) -> Result<Trainer> {
    let model = network(config, &source.arch, portion, precision, &*ops)?;
    configured(config, model, ranks, precision, longest, ops)
}

/// What a rank holds of the network of an architecture, as the configuration wants it.
pub(crate) fn network(config: &Config, arch: &Arch, portion: &Portion, precision: Precision, ops: &dyn Ops) -> Result<Model> {
    let mut model = Model::part(arch, portion)?;
    if let Some(head) = &mut model.head {
        head.chunk_rows = match config.memory.loss_chunk {
            0 => chunk_rows(arch.vocab, precision.weights, ops.on_device()),
            rows => rows,
        };
    }
    Ok(model)
}

/// [`allocate`] as the configuration says, for documents of up to `longest` tokens.
pub(crate) fn configured(
    config: &Config,
    model: Model,
    ranks: Ranks,
    precision: Precision,
    longest: usize,
    ops: Arc<dyn Ops>,
) -> Result<Trainer> {
    let optim = &config.optim;
    let adamw = AdamWConfig { betas: optim.betas, eps: optim.eps, weight_decay: optim.weight_decay, clip: optim.clip };
    let settings = settings(config, &model.arch)?;
    let rope = RopeTables::new(&*ops, &model.arch, longest.max(1), precision.weights)?;
    allocate(model, ranks, precision, adamw, settings, rope, ops)
}

/// Weights (unspecified), gradients and moments of a model: everything that lives from the first step to the last.
pub fn allocate(
    model: Model,
    ranks: Ranks,
    precision: Precision,
    adamw: AdamWConfig,
    settings: Settings,
    rope: RopeTables,
    ops: Arc<dyn Ops>,
) -> Result<Trainer> {
    let before = ops.account(Purpose::Weights);
    let buckets = Buckets::new(&model, &ranks)?;
    let weights = Weights::alloc(buckets.slots(), precision.weights, &*ops)?;
    ops.account(Purpose::Gradients);
    let grads = Grads::zeros_in(buckets.slots(), precision.grads, &*ops)?;
    ops.account(Purpose::Optimizer);
    let optimizer = Optimizer::new(&*ops, buckets, precision.weights, precision.moments, precision.offload, adamw)?;
    ops.account(before);
    Ok(Trainer { ops, ranks, model, weights, grads, optimizer, rope, settings, stop: Arc::default() })
}

/// What is minimised: the loss, and for models with experts the auxiliary losses.
fn settings(config: &Config, arch: &Arch) -> Result<Settings> {
    let train = &config.train;
    let coef = |moe: &temper_config::Moe| train.aux_loss_coef.unwrap_or(moe.aux_coef);
    let balance = match (&arch.moe, train.aux_loss) {
        (None, AuxLoss::Hf | AuxLoss::Megatron) => {
            return Err(Error::Input(format!(
                "train.aux_loss: the model ({:?}) has no experts to balance. Remove the key",
                arch.model_type
            )));
        }
        (None, _) | (Some(_), AuxLoss::None) => None,
        (Some(moe), AuxLoss::Auto) => moe.aux_in_loss.then(|| (Balance::Hf, coef(moe))),
        (Some(moe), AuxLoss::Hf) => Some((Balance::Hf, coef(moe))),
        (Some(moe), AuxLoss::Megatron) => Some((Balance::Megatron, coef(moe))),
    };
    let recompute = Recompute::of(&config.memory);
    Ok(Settings { reduction: train.loss_reduction, balance, z_coef: train.z_loss_coef, recompute })
}
