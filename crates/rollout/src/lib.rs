//! The generation engine.
//!
//! Owns: the scheduler that batches requests, the blocks of the paged KV cache, the sampler, stop conditions, and the
//! rule which tokens end a text.
//!
//! Must not know: rewards, the optimizer, tokenizers (the caller passes a function that decodes).
//!
//! The path of a token: [`Engine::add`] checks a [`Request`] and queues it; [`Engine::step`] lets the scheduler choose
//! what to compute and where its keys and values go, runs the model once, draws a token for every sequence that has all
//! its tokens in the cache ([`sample`]), and turns tokens into text until something ends it.

mod blocks;
mod end_tokens;
mod engine;
mod error;
mod request;
mod sampler;
mod scheduler;
mod text;

pub use end_tokens::{EndTokenFiles, EndTokens, end_tokens, end_tokens_in};
pub use engine::{Engine, EngineOptions, Stats};
pub use error::{Error, LogitFault, Result};
pub use request::{Completion, Finish, Output, Request, RequestId};
pub use sampler::{Choice, Sampling, sample};
