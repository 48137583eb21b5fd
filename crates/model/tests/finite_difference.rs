//! Every layer's backward against central differences of its forward, in f64, for the input and every weight.
//!
//! With step h = 1e-5 the truncation error is of order h^2 = 1e-10 and the rounding error eps/h = 1e-11, so a relative tolerance of
//! 1e-6 of the largest derivative leaves room for curvature and still sees any missing term.

mod common;
use common::*;
use std::sync::Arc;
use temper_config::{Arch, ModelType};
use temper_model::aux::AuxGrad;
use temper_model::param::ParamId;
use temper_model::{
    Act, AuxSettings, AuxStats, Batch, Cx, Grads, Model, Objective, Recompute, attention::Attention, loss_sum, mlp::Mlp, moe::Moe,
};
use temper_tensor::{Balance, DType, Tensor};

const H: f64 = 1e-5;
const TOLERANCE: f64 = 1e-6;

/// A scalar function of weights and input.
type Loss<'f> = &'f dyn Fn(&Cx, &Act) -> f64;
/// Its gradient: adds the weights' and returns the input's.
type Gradient<'f> = &'f dyn Fn(&Cx, &Act, &mut Grads) -> Option<Act>;

/// Compares `gradient` with central differences of `loss` for the input `x` and all weights.
fn check(what: &str, setup: &mut Setup, batch: &Batch, x: &[f64], shape: &[usize], loss: Loss, gradient: Gradient) {
    let input = |s: &Setup, x: &[f64]| -> Act { Arc::new(floats(&s.ops, x, shape, DType::F64)) };
    let mut grads = setup.grads();
    let dx = gradient(&setup.cx(batch), &input(setup, x), &mut grads);
    if let Some(dx) = dx {
        let numeric: Vec<f64> = (0..x.len())
            .map(|i| {
                let at = |d: f64| {
                    let mut moved = x.to_vec();
                    moved[i] += d;
                    loss(&setup.cx(batch), &input(setup, &moved))
                };
                (at(H) - at(-H)) / (2.0 * H)
            })
            .collect();
        close(what, "input", &setup.read(&dx), &numeric);
    }
    let x = input(setup, x);
    for (p, analytic) in setup.host_grads(&grads).iter().enumerate() {
        let numeric: Vec<f64> = (0..analytic.len())
            .map(|i| {
                let mut at = |d: f64| {
                    nudge(setup, ParamId(p), i, d);
                    let l = loss(&setup.cx(batch), &x);
                    nudge(setup, ParamId(p), i, -d);
                    l
                };
                (at(H) - at(-H)) / (2.0 * H)
            })
            .collect();
        close(what, &setup.model.params[p].name.clone(), analytic, &numeric);
    }
}

fn nudge(setup: &mut Setup, id: ParamId, i: usize, by: f64) {
    setup.weights.get_mut(id).unwrap().into_slice::<f64>().unwrap()[i] += by;
}

fn close(what: &str, name: &str, analytic: &[f64], numeric: &[f64]) {
    let largest = numeric.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    if largest < 1e-9 {
        let found = analytic.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        assert!(found < 1e-9, "{what}: {name} has gradient {found} but does not act on the loss");
        return;
    }
    let error = relative(analytic, numeric);
    assert!(error < TOLERANCE, "{what}: gradient of {name} differs by {error:e}");
}

/// `<y, r>` for fixed random r.
fn dot(s: &Cx, y: &Tensor) -> f64 {
    host(s.ops, y.view()).iter().zip(normal(y.numel(), 9)).map(|(a, b)| a * b).sum()
}

/// Its gradient, r.
fn dot_grad(cx: &Cx, shape: &[usize]) -> Act {
    Arc::new(floats(cx.ops, &normal(shape.iter().product(), 9), shape, DType::F64))
}

/// A copy of an activation that a layer may consume.
fn own(cx: &Cx, x: &Act) -> Tensor {
    let mut y = cx.alloc(x.shape()).unwrap();
    cx.ops.copy(y.view_mut(), x.view()).unwrap();
    y
}

fn packed(s: &Setup) -> Batch {
    documents(&s.ops, DType::F64, s.model.arch.vocab, &[3, 1, 4], |_| true)
}

fn check_attention(what: &str, arch: &Arch) {
    let mut s = Setup::random(arch, DType::F64);
    let (batch, shape) = (packed(&s), [8, arch.hidden]);
    let layer = Attention::new(arch, &s.names, "model.layers.1.self_attn").unwrap();
    let loss = |cx: &Cx, x: &Act| dot(cx, &layer.forward(cx, own(cx, x)).unwrap().0);
    let gradient = |cx: &Cx, x: &Act, grads: &mut Grads| {
        let (_, saved) = layer.forward(cx, own(cx, x)).unwrap();
        let (dx, work) = layer.backward_input(cx, saved, &dot_grad(cx, &shape)).unwrap();
        layer.backward_weight(cx, work, grads).unwrap();
        Some(Arc::new(dx))
    };
    check(what, &mut s, &batch, &normal(8 * arch.hidden, 1), &shape, &loss, &gradient);
}

#[test]
fn attention() {
    check_attention("plain", &tiny(ModelType::Llama));
    check_attention("one group", &Arch { kv_heads: 4, ..tiny(ModelType::Llama) });
    check_attention("one key head", &Arch { kv_heads: 1, head_dim: 6, ..tiny(ModelType::Llama) });
    check_attention("bias on qkv", &tiny(ModelType::Qwen2));
    check_attention("norm on heads", &tiny(ModelType::Qwen3));
    check_attention("norm and all biases", &Arch { qkv_bias: true, out_bias: true, ..tiny(ModelType::Qwen3) });
}

#[test]
fn dense_feed_forward() {
    for mlp_bias in [false, true] {
        let arch = Arch { mlp_bias, ..tiny(ModelType::Llama) };
        let mut s = Setup::random(&arch, DType::F64);
        let (batch, shape) = (packed(&s), [8, arch.hidden]);
        let layer = Mlp::new(&arch, &s.names, "model.layers.0.mlp").unwrap();
        let loss = |cx: &Cx, x: &Act| dot(cx, &layer.forward(cx, own(cx, x)).unwrap().0);
        let gradient = |cx: &Cx, x: &Act, grads: &mut Grads| {
            let (_, saved) = layer.forward(cx, own(cx, x)).unwrap();
            let (dx, work) = layer.backward_input(cx, saved, &dot_grad(cx, &shape)).unwrap();
            layer.backward_weight(cx, work, grads).unwrap();
            Some(Arc::new(dx))
        };
        check("mlp", &mut s, &batch, &normal(8 * arch.hidden, 2), &shape, &loss, &gradient);
    }
}

fn aux(kind: Balance, coef: f64, z_coef: f64) -> AuxSettings {
    AuxSettings { kind, coef, z_coef, scale: 0.5 }
}

/// Value of the auxiliary losses of one layer with coefficients, and their gradient.
fn aux_of(cx: &Cx, arch: &Arch, layer: &Moe, saved: &temper_model::moe::Saved, settings: &AuxSettings) -> (f64, AuxGrad) {
    let mut stats = AuxStats::new(cx, arch).unwrap().unwrap();
    stats.count(cx.ops, layer.row, &saved.routing, cx.real_rows()).unwrap();
    let (loss, grad) = stats.finish(cx.ops, 8, settings).unwrap();
    let value = |t: &Tensor| host(cx.ops, t.view())[0];
    let total = settings.scale * (settings.coef * value(&loss.balance) + settings.z_coef * value(&loss.z));
    (total, grad)
}

fn check_moe(what: &str, normalise: bool, top_k: usize, settings: &AuxSettings) {
    let arch = Arch { layers: 1, ..tiny_moe(5, top_k, normalise) };
    let mut s = Setup::random(&arch, DType::F64);
    let (batch, shape) = (packed(&s), [8, arch.hidden]);
    let layer = Moe::new(&arch, &s.names, "model.layers.0.mlp", 0).unwrap();
    let loss = |cx: &Cx, x: &Act| {
        let (y, saved) = layer.forward(cx, own(cx, x)).unwrap();
        dot(cx, &y) + aux_of(cx, &arch, &layer, &saved, settings).0
    };
    let gradient = |cx: &Cx, x: &Act, grads: &mut Grads| {
        let (_, saved) = layer.forward(cx, own(cx, x)).unwrap();
        let (_, aux_grad) = aux_of(cx, &arch, &layer, &saved, settings);
        Some(Arc::new(layer.backward(cx, saved, &dot_grad(cx, &shape), &aux_grad, grads).unwrap()))
    };
    check(what, &mut s, &batch, &normal(8 * arch.hidden, 4), &shape, &loss, &gradient);
}

#[test]
fn experts() {
    check_moe("normalised", true, 2, &aux(Balance::Hf, 0.0, 0.0));
    check_moe("not normalised", false, 2, &aux(Balance::Hf, 0.0, 0.0));
    check_moe("one expert a token", false, 1, &aux(Balance::Hf, 0.0, 0.0));
    check_moe("balance as in Hugging Face", true, 2, &aux(Balance::Hf, 3.0, 0.0));
    check_moe("balance as in Megatron", false, 3, &aux(Balance::Megatron, 3.0, 0.0));
    check_moe("z-loss", true, 2, &aux(Balance::Megatron, 0.0, 0.7));
    check_moe("all of it", false, 2, &aux(Balance::Hf, 2.0, 0.5));
}

/// The whole network with its objective: embedding, norms, residuals, head, auxiliary losses over several layers.
fn check_network(
    what: &str,
    arch: &Arch,
    lengths: &[usize],
    trained: impl Fn(usize) -> bool,
    settings: Option<AuxSettings>,
    recompute: Recompute,
) {
    let mut s = Setup::random(arch, DType::F64);
    let batch = documents(&s.ops, DType::F64, arch.vocab, lengths, trained);
    let objective = Objective { loss_scale: 0.25, aux: settings, recompute };
    let mut model = Model::new(arch).unwrap();
    // Several chunks, so that overwriting instead of accumulating between them shows.
    model.head.as_mut().unwrap().chunk_rows = 3;
    let loss = |cx: &Cx, _: &Act| {
        let out = model.forward_loss(cx, &settings).unwrap();
        let main = 0.25 * loss_sum(cx.ops, &out.losses, cx.batch.labels().unwrap()).unwrap();
        let value = |t: &Tensor| host(cx.ops, t.view())[0];
        let extra = out.aux.zip(settings).map(|(a, s)| s.scale * (s.coef * value(&a.balance) + s.z_coef * value(&a.z)));
        main + extra.unwrap_or(0.0)
    };
    let gradient = |cx: &Cx, _: &Act, grads: &mut Grads| {
        model.forward_backward(cx, grads, &objective).unwrap();
        None
    };
    check(what, &mut s, &batch, &[0.0], &[1], &loss, &gradient);
}

#[test]
fn networks() {
    let llama = Arch { layers: 1, ..tiny(ModelType::Llama) };
    check_network("untied, few targets", &llama, &[4, 3], |t| t % 3 == 1, None, Recompute::None);
    check_network("tied, all targets", &Arch { tied: true, ..llama.clone() }, &[2, 5], |_| true, None, Recompute::None);
    check_network("no target at all", &llama, &[2, 2], |_| false, None, Recompute::None);
    let moe = tiny_moe(3, 2, true);
    let settings = Some(aux(Balance::Hf, 0.8, 0.3));
    check_network("experts with pooled balance", &moe, &[3, 4], |_| true, settings, Recompute::None);
    let settings = Some(aux(Balance::Megatron, 0.8, 0.3));
    check_network("experts, recomputed", &moe, &[3, 4], |t| t == 0, settings, Recompute::Full);
}
