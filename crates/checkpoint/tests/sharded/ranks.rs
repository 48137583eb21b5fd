//! Layouts of a small model over threads, and values that no two elements share.

use super::common::side_folder;
use half::bf16;
use proptest::prelude::*;
use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use temper_checkpoint::{
    Checkpoint, Entry, Error, Hook, Kind, Saver, Sidecar, Slot, Store, Traffic,
    store::{Committed, Request, own_ranges},
};
use temper_comm::{Comm, World, threads};
use temper_config::{Arch, ModelType, Moe};
use temper_model::{AxisRank, Seat, declare, param::Param};
use temper_tensor::{DType, Tensor, View};

pub const PATIENCE: Duration = Duration::from_secs(30);

/// Two layers; with experts, the second layer has four.
pub fn arch(tied: bool, experts: bool, vocab: usize) -> Arch {
    let moe = Moe {
        experts: 4,
        top_k: 2,
        intermediate: 6,
        normalise: true,
        sparse_step: 2,
        dense_layers: Vec::new(),
        aux_coef: 0.0,
        aux_in_loss: false,
    };
    Arch {
        model_type: if experts { ModelType::Qwen3Moe } else { ModelType::Qwen3 },
        hidden: 8,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 2,
        intermediate: 12,
        vocab,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        max_positions: 64,
        tied,
        qkv_bias: true,
        out_bias: true,
        mlp_bias: false,
        qk_norm: true,
        moe: experts.then_some(moe),
        init_std: 0.02,
        dtype: None,
        bos: None,
        eos: Vec::new(),
        notices: Vec::new(),
    }
}

/// How a model is divided. The share of a data rank may begin and end anywhere.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub tp: usize,
    pub dp: usize,
    pub pp: usize,
    pub ep: usize,
    pub etp: usize,
    pub cuts: u64,
}

impl Layout {
    pub const ONE: Layout = Layout { tp: 1, dp: 1, pp: 1, ep: 1, etp: 1, cuts: 0 };

    pub fn ranks(&self) -> usize {
        self.tp * self.dp * self.pp
    }

    /// Any that a model of [`arch`] allows.
    pub fn any() -> impl Strategy<Value = Layout> {
        let axes = (0..3usize, 1..4usize, 1..3usize, 0..3usize, 0..2usize, any::<u64>());
        axes.prop_map(|(tp, dp, pp, ep, etp, cuts)| Layout { tp: 1 << tp, dp, pp, ep: 1 << ep, etp: 1 << etp, cuts })
            .prop_filter("experts must divide a stage", |l| (l.tp * l.dp).is_multiple_of(l.ep * l.etp))
    }
}

/// What one rank holds.
pub struct Held {
    pub params: Vec<Param>,
    /// Its share of each on the data axis.
    pub shares: Vec<Range<usize>>,
    pub tp_rank: usize,
}

/// Cuts `len` elements into `of` shares at places that depend on a seed.
fn share(len: usize, rank: usize, of: usize, seed: u64) -> Range<usize> {
    let mut cuts: Vec<usize> = (1..of as u64).map(|i| (mix(seed ^ i << 32 ^ len as u64) % (len as u64 + 1)) as usize).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts[rank]..cuts[rank + 1]
}

/// What `rank` of a layout holds, in Megatron's order of ranks with parallel folding.
pub fn held(arch: &Arch, layout: &Layout, rank: usize) -> Held {
    let Layout { tp, dp, pp, ep, etp, cuts } = *layout;
    let (stage, within) = (rank / (tp * dp), rank % (tp * dp));
    let expert_dp = tp * dp / (ep * etp);
    let axis = |rank: usize, of: usize| AxisRank { rank, of };
    let seat = Seat { tp: axis(within % tp, tp), ep: axis(within / etp % ep, ep), etp: axis(within % etp, etp) };
    let layers = axis(stage, pp).share(arch.layers);
    let (first, last) = (stage == 0, stage + 1 == pp);
    let has = |p: &Param| match p.layer() {
        Some(layer) => layers.contains(&layer),
        None if p.name.starts_with("model.embed") => first || (last && arch.tied),
        None => last,
    };
    let mut params: Vec<Param> = declare(arch).iter().filter(|p| has(p)).map(|p| p.at(&seat)).collect();
    params.iter_mut().filter(|p| p.name.starts_with("model.embed") && !first).for_each(|p| p.counted = false);
    let shares = params.iter().enumerate().map(|(i, p)| {
        let expert = p.name.contains(".experts.");
        let (replica, of) = if expert { (within / (ep * etp), expert_dp) } else { (within / tp, dp) };
        share(p.numel(), replica, of, cuts ^ i as u64)
    });
    let shares = shares.collect();
    Held { params, shares, tp_rank: seat.tp.rank }
}

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// The seed of a logical tensor's elements.
fn seed(step: usize, kind: Kind, name: &str) -> u64 {
    name.bytes().fold(kind as u64 + 7 * step as u64, |h, b| mix(h ^ u64::from(b)))
}

/// The values of a rank's parameter, F32 or BF16: any bits at all, not-a-number too.
pub fn values(step: usize, kind: Kind, param: &Param, dtype: DType) -> Tensor {
    let runs = param.pieces.iter().flat_map(|p| {
        let seed = seed(step, kind, &p.name);
        p.runs().map(move |r| (seed, r))
    });
    let all: Vec<u32> = runs.flat_map(|(seed, r)| (r.disk..r.disk + r.len).map(move |e| mix(seed ^ e as u64) as u32)).collect();
    match dtype {
        DType::BF16 => Tensor::from_vec(all.into_iter().map(|b| bf16::from_bits(b as u16)).collect(), &[param.numel()]),
        _ => Tensor::from_vec(all.into_iter().map(f32::from_bits).collect(), &[param.numel()]),
    }
}

pub fn part<'a>(t: &'a Tensor, range: &Range<usize>) -> View<'a> {
    match t.dtype() {
        DType::BF16 => View::host(&t.as_slice::<bf16>().unwrap()[range.clone()], &[range.len()]),
        _ => View::host(&t.as_slice::<f32>().unwrap()[range.clone()], &[range.len()]),
    }
}

pub fn same_bits(a: View<'_>, b: View<'_>) -> bool {
    match (a.as_slice::<f32>(), b.as_slice::<f32>()) {
        (Some(a), Some(b)) => a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits())),
        _ => a.as_slice::<bf16>().unwrap().iter().map(|x| x.to_bits()).eq(b.as_slice::<bf16>().unwrap().iter().map(|x| x.to_bits())),
    }
}

/// What a rank saves.
pub type Entries = Vec<(Kind, Param, Range<usize>)>;

/// A model and where its run saves.
pub struct Job {
    pub arch: Arch,
    /// Of weights; moments are F32.
    pub dtype: DType,
    pub root: PathBuf,
    pub side: Sidecar,
    /// Bytes of buffers.
    pub host_bytes: u64,
    /// How often a step is saved, by the same savers.
    pub times: usize,
}

impl Job {
    pub fn new(root: &Path, arch: Arch, dtype: DType) -> Job {
        Job { arch, dtype, root: root.into(), side: side_folder(&root.join("base")), host_bytes: 1 << 30, times: 1 }
    }

    pub fn dir(&self) -> PathBuf {
        self.root.join("run")
    }

    pub fn store(&self) -> Store {
        Store::new(&self.dir())
    }

    fn dtype(&self, kind: Kind) -> DType {
        if kind == Kind::Weight { self.dtype } else { DType::F32 }
    }

    /// One rank's part of a save. `tamper` may change the entries' parameters and ranges.
    pub fn save_rank(
        &self,
        store: Arc<Store>,
        comm: Arc<dyn Comm>,
        layout: &Layout,
        step: usize,
        tamper: &dyn Fn(usize, &mut Entries),
    ) -> Result<Committed, Error> {
        let rank = comm.rank();
        let held = held(&self.arch, layout, rank);
        let whole = declare(&self.arch);
        let mut entries = Vec::new();
        for kind in Kind::ALL {
            for (param, share) in held.params.iter().zip(&held.shares) {
                entries.extend(own_ranges(param, share, held.tp_rank).into_iter().map(|range| (kind, param.clone(), range)));
            }
        }
        tamper(rank, &mut entries);
        let entries: Vec<(Kind, Param, Range<usize>, Tensor)> = entries
            .into_iter()
            .map(|(kind, param, range)| (kind, param.clone(), range, values(step, kind, &param, self.dtype(kind))))
            .collect();
        let mut saver = Saver::new(store, comm, self.host_bytes);
        let mut committed = None;
        for _ in 0..self.times {
            let state = serde_json::json!({ "cursor": step * 8 });
            let mut save = saver.begin(Request { step, whole: &whole, state, sidecar: self.side.clone() })?;
            for (kind, param, range, values) in &entries {
                save.add(Entry { kind: *kind, param, range: range.clone(), data: part(values, range) })?;
            }
            save.finish()?;
            committed = saver.wait()?;
        }
        Ok(committed.expect("a save was under way"))
    }

    pub fn save(&self, layout: &Layout, step: usize) -> Vec<Result<Committed, Error>> {
        self.save_hooked(layout, step, |_| None, &|_, _| ())
    }

    pub fn save_hooked(
        &self,
        layout: &Layout,
        step: usize,
        hook: impl Fn(usize) -> Option<Hook> + Sync,
        tamper: &(dyn Fn(usize, &mut Entries) + Sync),
    ) -> Vec<Result<Committed, Error>> {
        on_ranks(layout.ranks(), |comm| {
            let store = self.store();
            let store = match hook(comm.rank()) {
                Some(hook) => store.with_hook(hook),
                None => store,
            };
            self.save_rank(Arc::new(store), comm, layout, step, tamper)
        })
    }

    /// Reads a rank's shares and compares every bit.
    pub fn read_rank(&self, checkpoint: &Checkpoint, layout: &Layout, rank: usize) -> temper_checkpoint::Result<Traffic> {
        let held = held(&self.arch, layout, rank);
        let mut wants: Vec<(Kind, &Param, &Range<usize>, Tensor)> = Vec::new();
        for kind in Kind::ALL {
            let empty = |len: usize| match self.dtype(kind) {
                DType::BF16 => Tensor::from_vec(vec![bf16::ONE; len], &[len]),
                _ => Tensor::from_vec(vec![1f32; len], &[len]),
            };
            wants.extend(held.params.iter().zip(&held.shares).map(|(p, range)| (kind, p, range, empty(range.len()))));
        }
        let slots = wants.iter_mut().map(|(kind, param, range, t)| Slot { kind: *kind, param, range: range.clone(), into: t.view_mut() });
        let traffic = checkpoint.read(slots.collect())?;
        for (kind, param, range, got) in &wants {
            let want = values(checkpoint.step(), *kind, param, self.dtype(*kind));
            assert!(same_bits(got.view(), part(&want, range)), "rank {rank}: {kind} of {} {range:?}", param.name);
        }
        Ok(traffic)
    }

    /// Has every rank of a layout go on from the newest checkpoint; its step and rank 0's notices.
    pub fn resume(&self, layout: &Layout) -> Result<Option<(usize, Vec<String>)>, Error> {
        let mut all = on_ranks(layout.ranks(), |comm| {
            let rank = comm.rank();
            let found = self.store().resume(&*comm, |checkpoint| self.read_rank(checkpoint, layout, rank))?;
            Ok(found.map(|(_, checkpoint, notices)| {
                assert_eq!(checkpoint.state()["cursor"], checkpoint.step() * 8);
                (checkpoint.step(), notices)
            }))
        });
        let steps: Vec<_> = all
            .iter()
            .map(|r: &Result<_, Error>| r.as_ref().map(|f| f.as_ref().map(|f: &(usize, Vec<String>)| f.0)).map_err(|e| e.to_string()))
            .collect();
        assert!(steps.windows(2).all(|w| w[0] == w[1]), "{steps:?}");
        all.swap_remove(0)
    }

    #[track_caller]
    pub fn assert_resumes(&self, layout: &Layout, step: usize) -> Vec<String> {
        let (found, notices) = self.resume(layout).unwrap().expect("a checkpoint");
        assert_eq!(found, step, "{notices:?}");
        notices
    }
}

/// Runs `work` on every rank of a group of threads.
pub fn on_ranks<T: Send>(n: usize, work: impl Fn(Arc<dyn Comm>) -> T + Sync) -> Vec<T> {
    let worlds = threads(n, PATIENCE);
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                scope.spawn(move || {
                    let comm = world.group("checkpoint", &(0..n).collect::<Vec<_>>()).unwrap();
                    // Whoever wants to end the rank drops the group.
                    drop(world);
                    work(comm)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}
