//! What goes into the engine and what comes out.

use crate::{Error, Result, Sampling};

/// A text to continue.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The tokens to continue, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Most tokens to generate, at least one.
    pub max_tokens: usize,
    /// Tokens that end the text; the one met is in [`Completion::tokens`] but never in the text.
    pub end_tokens: Vec<u32>,
    /// Texts that end generation; neither the one met nor what follows it is in the text.
    pub stop: Vec<String>,
}

impl Request {
    /// A greedy request without stop strings.
    pub fn greedy(prompt: &[u32], max_tokens: usize, end_tokens: &[u32]) -> Request {
        Request { prompt: prompt.to_vec(), sampling: Sampling::default(), max_tokens, end_tokens: end_tokens.to_vec(), stop: Vec::new() }
    }

    /// Tokens the request can come to.
    pub fn longest(&self) -> usize {
        self.prompt.len().saturating_add(self.max_tokens)
    }

    /// Checks everything that depends on neither the engine's memory nor its decoder.
    pub(crate) fn check(&self, vocab: usize, max_positions: usize) -> Result<()> {
        let fault = |what: String| Err(Error::Request(what));
        if self.prompt.is_empty() {
            return fault("the prompt has no tokens; give at least one".into());
        }
        if let Some(id) = self.prompt.iter().find(|id| **id as usize >= vocab) {
            return fault(format!("prompt token {id} is outside the model's vocabulary of {vocab}; use the model's own tokenizer"));
        }
        if self.prompt.len() >= max_positions {
            let length = self.prompt.len();
            return fault(format!(
                "the prompt has {length} tokens, which leaves no room in the model's {max_positions} positions; shorten it"
            ));
        }
        if self.max_tokens == 0 {
            return fault("max_tokens is 0; ask for at least one token".into());
        }
        if self.stop.iter().any(String::is_empty) {
            return fault("an empty stop string would end every text at once; remove it".into());
        }
        self.sampling.check()
    }
}

/// Names a request within its engine, in the order of [`Engine::add`](crate::Engine::add).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Why a text ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// This token was generated.
    EndToken(u32),
    /// This text was generated.
    StopString(String),
    /// `max_tokens` were generated.
    MaxTokens,
    /// The model has no further positions.
    ContextFull,
}

impl Finish {
    /// `stop` or `length`, as chat APIs call it.
    pub fn reason(&self) -> &'static str {
        match self {
            Finish::EndToken(_) | Finish::StopString(_) => "stop",
            Finish::MaxTokens | Finish::ContextFull => "length",
        }
    }
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Whose.
    pub id: RequestId,
    /// The token.
    pub token: u32,
    /// Its log-probability under the model, before temperature and filters.
    pub log_prob: f64,
    /// Text that became certain with it: whole characters only, and nothing that may still turn out to begin a stop
    /// string. Empty without a decoder.
    pub text: String,
    /// Set with the last token of the request.
    pub finish: Option<Finish>,
}

/// A finished text.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// All generated tokens, an end token included.
    pub tokens: Vec<u32>,
    /// Log-probability of each under the model, before temperature and filters.
    pub log_probs: Vec<f64>,
    /// The text, without end token and stop string. Empty without a decoder.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
}
