//! Model FLOPs: what the mathematics needs, whatever the implementation repeats.
//!
//! Per token, as in docs/NUMERICS.md: 6 x the parameters it meets (the embedding's look-up left out, the output matrix counted),
//! plus 6 x layers x heads x head size x length for causal attention (PaLM's count, halved for causality). A Gated DeltaNet
//! layer has no length in it: per value head a state of Dk x Dv is decayed, read, corrected and read again.

use crate::network::Network;

/// FLOPs of forward and backward of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelFlops {
    /// Parameters that multiply each token.
    pub params: f64,
    /// FLOPs a token and position: attention.
    pub per_position: f64,
    /// FLOPs a token in linear attention's recurrence.
    pub recurrence: f64,
}

impl ModelFlops {
    /// Of a network.
    pub fn new(network: &Network) -> ModelFlops {
        let arch = &network.arch;
        let look_up = if arch.tied { 0 } else { arch.vocab as u64 * arch.hidden as u64 };
        let attention = network.attention_layers();
        let recurrence = network.hybrid.as_ref().map_or(0.0, |h| {
            // Decay, k.S, the outer product and q.S: 1 + 2 + 2 + 2 operations an element, forward; three times with backward.
            let layers = (arch.layers - attention) as f64;
            3.0 * 7.0 * layers * h.value_heads as f64 * (h.key_dim * h.value_dim) as f64
        });
        ModelFlops {
            params: network.active.saturating_sub(look_up) as f64,
            per_position: 6.0 * attention as f64 * (arch.heads * arch.head_dim) as f64,
            recurrence,
        }
    }

    /// FLOPs of a token in a document of `length` tokens, forward and backward.
    pub fn per_token(&self, length: f64) -> f64 {
        6.0 * self.params + self.per_position * length + self.recurrence
    }
}

/// Model FLOPs utilisation: the share of a device's peak that `tokens_per_s` of one device amounts to.
pub fn mfu(flops: &ModelFlops, length: f64, tokens_per_s: f64, peak: f64) -> f64 {
    flops.per_token(length) * tokens_per_s / peak
}
