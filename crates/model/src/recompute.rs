//! What the forward pass keeps for the backward pass, and what is computed again.

/// What is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// All activations.
    #[default]
    None,
    /// All but the chosen parts, each computed again from what it was computed from.
    Selective(Parts),
    /// Only the input of each layer; its forward runs again just before its backward.
    Full,
}

/// Parts of a layer that are computed again. Attention itself is always kept (its output and log-sum-exp).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Outputs of the two norms.
    pub norm: bool,
    /// SwiGLU's output; q, k, v after norm and rotation. One pass over memory each.
    pub act: bool,
    /// The experts: gathered rows and their two products (the router's decision is kept).
    pub moe: bool,
    /// The first product of the dense feed-forward, and its activation.
    pub mlp: bool,
    /// The product of q, k and v, and what follows from it.
    pub qkv: bool,
}
