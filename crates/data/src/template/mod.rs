//! Chat templates: from messages to the text a model reads.
//!
//! Templates are Jinja as `transformers` runs it: `trim_blocks`, `lstrip_blocks`, Python's methods on strings,
//! lists and dicts, `tojson` as `json.dumps`, `raise_exception`, `strftime_now` and `{% generation %}`.

mod generation;
mod private_use;
mod python;
mod source;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Value};

use crate::{Conversation, Error, Message};
pub(crate) use private_use::{PrivateUse, for_each_string, for_each_string_in_map};

/// Work one rendering may cost: instructions, and one more for every 64 bytes a template produces. Far above any
/// real template; it bounds the time and memory of a malicious one.
const FUEL: u64 = 10_000_000;
const ENTRY: &str = "chat_template";

/// A template that does not compile, or refuses a conversation. Displays as `template:line: message`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateError {
    /// Where the template came from: a file, or its built-in name.
    pub template: String,
    /// Line in the template, from 1, where known.
    pub line: Option<usize>,
    /// What went wrong.
    pub message: String,
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "template {}:", self.template)?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        write!(f, " {}", self.message)
    }
}

impl std::error::Error for TemplateError {}

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// Byte ranges that the template put between `{% generation %}` and `{% endgeneration %}`, in order.
    pub generation: Vec<Range<usize>>,
}

/// Messages and tools in the template engine's own types.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    pub messages: Vec<Value>,
    pub tools: Option<Value>,
}

impl Turns {
    /// The conversation as the template sees it.
    pub fn of(messages: &[Message], tools: Option<&serde_json::Value>) -> Self {
        Self { messages: messages.iter().map(|m| python::map_value(&m.fields)).collect(), tools: tools.map(python::json_value) }
    }

    /// Replaces the content of message `i`.
    pub fn set_content(&mut self, i: usize, message: &Message, content: &str) {
        let mut fields = message.fields.clone();
        fields.insert("content".into(), content.into());
        if let Some(slot) = self.messages.get_mut(i) {
            *slot = python::map_value(&fields);
        }
    }
}

/// A compiled chat template with its variables.
#[derive(Clone)]
pub struct ChatTemplate {
    env: Arc<Environment<'static>>,
    name: String,
    source: String,
    marks_generation: bool,
    /// Template arguments and special tokens, in that order of precedence.
    variables: Vec<(String, Value)>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles `source`. `name` is what errors call it; `arguments` are extra variables (`data.template_args`);
    /// `specials` are `bos_token` and the like.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub fn compile(
        name: &str,
        source: &str,
        arguments: &serde_json::Map<String, serde_json::Value>,
        specials: &[(&str, &str)],
    ) -> Result<Self, TemplateError> {
        let fail = |line, message| TemplateError { template: name.to_string(), line, message };
        let (rewritten, marks_generation) = generation::rewrite(source).map_err(|(line, message)| fail(Some(line), message))?;
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| fail(None, e.to_string()))?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.set_fuel(Some(FUEL));
        python::install(&mut env);
        env.add_template_owned(ENTRY, rewritten).map_err(|e| error_of(name, &e))?;
        let mut variables: Vec<(String, Value)> = specials.iter().map(|(k, v)| ((*k).to_string(), Value::from(*v))).collect();
        variables.extend(arguments.iter().map(|(k, v)| (k.clone(), python::json_value(v))));
        Ok(Self { env: Arc::new(env), name: name.to_string(), source: source.to_string(), marks_generation, variables })
    }

    /// What errors call the template.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The Jinja text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template marks what the model writes with `{% generation %}`.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Whether the rendered text depends on the day it is rendered.
    pub fn reads_clock(&self) -> bool {
        self.source.contains("strftime_now")
    }

    /// Hash of everything the rendering depends on except the conversation.
    pub fn digest(&self) -> blake3::Hash {
        let mut hash = blake3::Hasher::new();
        hash.update(self.source.as_bytes());
        for (key, value) in &self.variables {
            hash.update(format!("\0{key}\0{value:?}").as_bytes());
        }
        if self.reads_clock() {
            hash.update(python::today().as_bytes());
        }
        hash.finalize()
    }

    /// Renders a conversation.
    ///
    /// # Errors
    /// What the template raises, a variable or method it lacks, or too much work; with the template's line.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, TemplateError> {
        self.render_messages(&conversation.messages, conversation.tools.as_ref(), false)
    }

    /// Renders messages; with `generation_prompt` the text ends where the model is to answer.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_messages(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        generation_prompt: bool,
    ) -> Result<Rendered, TemplateError> {
        let mut marks = PrivateUse::avoiding(messages, tools);
        self.render_turns(&Turns::of(messages, tools), generation_prompt, &mut marks)
    }

    /// Renders prepared turns; `marks` supplies characters that occur in none of them.
    pub(crate) fn render_turns(&self, turns: &Turns, prompt: bool, marks: &mut PrivateUse) -> Result<Rendered, TemplateError> {
        let (start, end) = (marks.fresh(), marks.fresh());
        let mut context = self.variables.clone();
        context.push(("messages".into(), Value::from(turns.messages.clone())));
        context.push(("tools".into(), turns.tools.clone().unwrap_or(Value::from(()))));
        context.push(("add_generation_prompt".into(), Value::from(prompt)));
        context.push((generation::START.into(), Value::from(start.to_string())));
        context.push((generation::END.into(), Value::from(end.to_string())));
        let template = self.env.get_template(ENTRY).map_err(|e| error_of(&self.name, &e))?;
        let text = template.render(Value::from_pairs(context)).map_err(|e| error_of(&self.name, &e))?;
        if !self.marks_generation {
            return Ok(Rendered { text, generation: Vec::new() });
        }
        generation::strip(&text, start, end).ok_or_else(|| TemplateError {
            template: self.name.clone(),
            line: None,
            message: "its generation blocks are nested or cut by a filter".into(),
        })
    }
}

/// The engine's error with our name for the template; the innermost cause is what a person needs.
fn error_of(name: &str, error: &minijinja::Error) -> TemplateError {
    let mut message = error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind()));
    if let Some(raised) = error.detail().and_then(|d| d.strip_prefix(python::RAISED)) {
        message = format!("the template refuses this conversation: {raised}");
    }
    TemplateError { template: name.to_string(), line: error.line(), message }
}

impl From<TemplateError> for Error {
    fn from(e: TemplateError) -> Self {
        let line = e.line.map(|l| format!("line {l}: ")).unwrap_or_default();
        Error::File {
            path: e.template.into(),
            found: format!("{line}{}", e.message),
            remedy: "correct the template or choose another with data.template".into(),
        }
    }
}

#[cfg(test)]
mod tests;
