//! What the tests of the networks share: tiny architectures, batches, and tensors from safetensors files.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod adam;
mod tiny;

#[allow(unused_imports, reason = "each test binary uses its own part")]
pub use tiny::{Micro, micro, relative, tiny};

use std::path::{Path, PathBuf};
use temper_config::{Arch, ModelType, Moe};
use temper_model::param::{Param, ParamId};
use temper_model::{Batch, Cx, Grads, Model, Names, RopeTables, Weights, read_floats};
use temper_tensor::cpu::Cpu;
use temper_tensor::{DType, Ops, Rng, Tensor, View};

/// As [`tiny`] with experts in every layer.
pub fn tiny_moe(experts: usize, top_k: usize, normalise: bool) -> Arch {
    let moe =
        Moe { experts, top_k, intermediate: 5, normalise, sparse_step: 1, dense_layers: Vec::new(), aux_coef: 0.01, aux_in_loss: true };
    Arch { moe: Some(moe), ..tiny(ModelType::Qwen3Moe) }
}

/// Random weights whose norms and biases are moved away from one and zero, so that no gradient hides.
pub fn random_weights(params: &[Param], seed: u64, dtype: DType, ops: &dyn Ops) -> Weights {
    let mut weights = Weights::random(params, seed, dtype, ops).unwrap();
    for (i, p) in params.iter().enumerate().filter(|(_, p)| p.shape.len() == 1) {
        let rng = Rng::new(seed ^ 1, i as u64);
        let values: Vec<f64> =
            (0..p.numel()).map(|j| f64::from(u8::from(!p.name.contains("bias"))) + 0.2 * rng.normal_at(j as u64)).collect();
        weights.set(ops, ParamId(i), floats(ops, &values, &p.shape, dtype)).unwrap();
    }
    weights
}

/// Host values as a tensor of `dtype`.
pub fn floats(ops: &dyn Ops, values: &[f64], shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::F64 => ops.from_host(View::host(values, shape)).unwrap(),
        _ => {
            let single: Vec<f32> = values.iter().map(|v| *v as f32).collect();
            ops.from_host(View::host(&single, shape)).unwrap()
        }
    }
}

/// Standard normal values.
pub fn normal(n: usize, seed: u64) -> Vec<f64> {
    let rng = Rng::new(seed, 77);
    (0..n).map(|i| rng.normal_at(i as u64)).collect()
}

/// Documents of the given lengths with random tokens; every token but the last of a document has the next one as target
/// where `trained` says so.
pub fn documents(ops: &dyn Ops, dtype: DType, vocab: usize, lengths: &[usize], trained: impl Fn(usize) -> bool) -> Batch {
    let mut rng = Rng::new(5, 5);
    let docs: Vec<Vec<i32>> = lengths.iter().map(|&n| (0..n).map(|_| rng.below(vocab) as i32).collect()).collect();
    let targets: Vec<Vec<i32>> = docs
        .iter()
        .map(|d| (0..d.len()).map(|t| if t + 1 < d.len() && trained(t) { d[t + 1] } else { temper_model::IGNORE }).collect())
        .collect();
    pack(ops, dtype, &docs, &targets)
}

/// Documents laid end to end, each target with weight one.
pub fn pack(ops: &dyn Ops, dtype: DType, docs: &[Vec<i32>], targets: &[Vec<i32>]) -> Batch {
    let ids = docs.concat();
    let positions: Vec<i32> = docs.iter().flat_map(|d| 0..d.len() as i32).collect();
    let mut cu = vec![0i32];
    for d in docs {
        cu.push(cu[cu.len() - 1] + d.len() as i32);
    }
    let targets = targets.concat();
    let weights: Vec<f32> = targets.iter().map(|t| f32::from(u8::from(*t != temper_model::IGNORE))).collect();
    Batch::new(ops, &ids, &positions, &cu).unwrap().with_labels(ops, dtype, &targets, &weights).unwrap()
}

/// A model with everything needed to run it.
pub struct Setup {
    pub ops: Cpu,
    pub model: Model,
    pub names: Names,
    pub weights: Weights,
    pub rope: RopeTables,
    pub dtype: DType,
}

impl Setup {
    /// Random weights for an architecture.
    pub fn random(arch: &Arch, dtype: DType) -> Setup {
        let ops = Cpu::new(1);
        let model = Model::new(arch).unwrap();
        let weights = random_weights(&model.params, 3, dtype, &ops);
        Setup::new(ops, model, weights, dtype)
    }

    fn new(ops: Cpu, model: Model, weights: Weights, dtype: DType) -> Setup {
        let rope = RopeTables::new(&ops, &model.arch, 64, dtype).unwrap();
        Setup { names: Names::new(&model.params), ops, model, weights, rope, dtype }
    }

    /// A fixture's model.
    pub fn fixture(name: &str, dtype: DType) -> Setup {
        let file = Golden::open(&fixture_path(name).join("model.safetensors"));
        Setup::with_weights(name, dtype, file.floats())
    }

    /// A fixture's model after its five optimizer steps.
    pub fn trained_fixture(name: &str, dtype: DType) -> Setup {
        let trained = Golden::fixture(name).floats().into_iter();
        let named = trained.filter_map(|(name, shape, values)| Some((name.strip_prefix("trained/")?.to_string(), shape, values)));
        Setup::with_weights(name, dtype, named.collect())
    }

    /// A fixture's architecture with the given tensors, which must be all of it.
    fn with_weights(name: &str, dtype: DType, tensors: Vec<NamedValues>) -> Setup {
        let ops = Cpu::new(2);
        let arch = Arch::from_folder(&fixture_path(name)).unwrap();
        let model = Model::new(&arch).unwrap();
        let names = Names::new(&model.params);
        let mut host: Vec<Vec<f64>> = model.params.iter().map(|p| vec![f64::NAN; p.numel()]).collect();
        for (name, shape, values) in tensors {
            let place = names.find(&name).unwrap_or_else(|| panic!("no place for {name}"));
            assert_eq!(place.shape, shape, "{name}");
            host[place.id.0][place.range.clone()].copy_from_slice(&values);
        }
        let mut weights = Weights::empty(&model.params, dtype);
        for (i, p) in model.params.iter().enumerate() {
            assert!(host[i].iter().all(|v| v.is_finite()), "{} was not filled", p.name);
            weights.set(&ops, ParamId(i), floats(&ops, &host[i], &p.shape, dtype)).unwrap();
        }
        Setup::new(ops, model, weights, dtype)
    }

    /// The context of a batch.
    pub fn cx<'a>(&'a self, batch: &'a Batch) -> Cx<'a> {
        Cx { ops: &self.ops, weights: &self.weights, rope: &self.rope, batch, ranks: temper_model::Ranks::single() }
    }

    /// Zero gradients.
    pub fn grads(&self) -> Grads {
        Grads::zeros(&self.model.params, self.dtype, &self.ops).unwrap()
    }

    /// A tensor on the host.
    pub fn read(&self, x: &Tensor) -> Vec<f64> {
        read_floats(&self.ops, x).unwrap()
    }

    /// The elements of a named tensor within gradients or weights.
    pub fn named(&self, name: &str, view: impl Fn(ParamId) -> Vec<f64>) -> Vec<f64> {
        let place = self.names.find(name).unwrap_or_else(|| panic!("no tensor {name}"));
        view(place.id)[place.range.clone()].to_vec()
    }

    /// All gradients on the host.
    pub fn host_grads(&self, grads: &Grads) -> Vec<Vec<f64>> {
        (0..self.model.params.len()).map(|i| host(&self.ops, grads.get(ParamId(i)).unwrap())).collect()
    }
}

/// A view on the host.
pub fn host(ops: &dyn Ops, x: View) -> Vec<f64> {
    let t = ops.to_host(x).unwrap();
    match t.dtype() {
        DType::F64 => t.as_slice::<f64>().unwrap().to_vec(),
        _ => t.as_slice::<f32>().unwrap().iter().map(|v| f64::from(*v)).collect(),
    }
}

/// Folder of a fixture.
pub fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Name, shape and values of a tensor.
pub type NamedValues = (String, Vec<usize>, Vec<f64>);

/// A safetensors file.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn open(path: &Path) -> Golden {
        Golden { bytes: std::fs::read(path).unwrap() }
    }

    pub fn fixture(name: &str) -> Golden {
        Golden::open(&fixture_path(name).join("golden.safetensors"))
    }

    fn file(&self) -> safetensors::SafeTensors<'_> {
        safetensors::SafeTensors::deserialize(&self.bytes).unwrap()
    }

    /// Every F32 tensor: name, shape, values.
    pub fn floats(&self) -> Vec<NamedValues> {
        let all = self.file();
        let f32s = all.iter().filter(|(_, t)| t.dtype() == safetensors::Dtype::F32);
        f32s.map(|(n, t)| (n.to_string(), t.shape().to_vec(), f32_values(t.data()))).collect()
    }

    /// A float tensor.
    pub fn float(&self, name: &str) -> Vec<f64> {
        f32_values(self.file().tensor(name).unwrap_or_else(|_| panic!("golden has no {name}")).data())
    }

    /// Whether there is such a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.file().tensor(name).is_ok()
    }

    /// A matrix of 64-bit integers as rows.
    pub fn rows(&self, name: &str) -> Vec<Vec<i32>> {
        let file = self.file();
        let t = file.tensor(name).unwrap();
        let values: Vec<i32> = t.data().as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b) as i32).collect();
        values.chunks(t.shape()[1]).map(<[i32]>::to_vec).collect()
    }
}

fn f32_values(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
}
