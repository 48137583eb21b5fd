//! [`Resolved`]: a configuration ready to run: paths found, automatic values chosen and explained, values checked together.

use crate::check;
use crate::config::{Config, Source, Template};
use crate::error::{Error, Result};
use crate::section::Reader;
use crate::tree::{Place, Tree};
use std::path::{Path, PathBuf};

/// Largest configuration file that is read.
const MAX_BYTES: u64 = 4 << 20;

/// Beginning of the reason of a value that the command line gives.
const SET: &str = "--set ";

/// A configuration with the story of its values.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The values.
    pub config: Config,
    /// For every value that the file does not give: dotted key, and why it is what it is.
    pub reasons: Vec<(String, String)>,
    /// Things worth telling the user that are not errors, e.g. a key that has no effect.
    pub notices: Vec<String>,
    /// Files that the configuration names and that are not here, where they need not be.
    pub absent: Vec<PathBuf>,
    /// The file.
    pub origin: PathBuf,
}

impl Resolved {
    /// Whether the file or the command line gives the key, e.g. `optim.lr`.
    pub fn gives(&self, key: &str) -> bool {
        self.reasons.iter().all(|(known, why)| known != key || why.starts_with(SET))
    }

    /// Records why the value of a key, which the caller has changed, is what it is.
    pub fn explain(&mut self, key: &str, why: impl Into<String>) {
        self.reasons.retain(|(known, _)| known != key);
        self.reasons.push((key.to_string(), why.into()));
    }

    /// The content of `config.resolved.json`: the file, every value, and the reason for each value that it does not give.
    pub fn to_json(&self) -> serde_json::Value {
        let reasons: serde_json::Map<_, _> = self.reasons.iter().map(|(key, why)| (key.clone(), why.clone().into())).collect();
        serde_json::json!({ "origin": self.origin.display().to_string(), "config": self.config, "reasons": reasons, "notices": self.notices })
    }
}

impl Config {
    /// Reads a configuration file and lays `--set` arguments (`key=value`) over it.
    ///
    /// Paths are relative to the file's folder, those of `--set` too, and come out absolute. A `--set` value is TOML, or text when it is not TOML.
    ///
    /// # Errors
    /// Names the file (with the line) or argument, the key, what was found and the remedy.
    pub fn load(path: &Path, sets: &[String]) -> Result<Resolved> {
        Self::resolved(&read(path)?, path, sets, Files::Needed)
    }

    /// As [`Config::load`], where neither data nor template need be here: what is not, [`Resolved::absent`] tells. A model folder that is not
    /// here stays as it is written.
    ///
    /// # Errors
    /// As [`Config::load`], but for those of absent files.
    pub fn load_without_files(path: &Path, sets: &[String]) -> Result<Resolved> {
        Self::resolved(&read(path)?, path, sets, Files::Unneeded)
    }

    /// As [`Config::load`], from text; `origin` is the file it stands for.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_toml(text: &str, origin: &Path, sets: &[String]) -> Result<Resolved> {
        Self::resolved(text, origin, sets, Files::Needed)
    }

    fn resolved(text: &str, origin: &Path, sets: &[String], files: Files) -> Result<Resolved> {
        let mut tree = Tree::parse(text, origin)?;
        for argument in sets {
            tree.set(argument)?;
        }
        let mut notices = set_aside(&mut tree);
        let reader = Reader { tree: &tree };
        let keys = Config::keys();
        reader.refuse_unknown(&keys)?;
        let mut config = Config::read(&reader)?;
        let mut paths = Paths { reader: &reader, folder: folder_of(origin)?, files, reasons: Vec::new(), absent: Vec::new() };
        paths.resolve(&mut config, origin)?;
        let Paths { mut reasons, absent, .. } = paths;
        if config.train.steps.is_none() && config.train.epochs.is_none() {
            config.train.epochs = Some(1.0);
            reasons.push(("train.epochs".to_string(), "neither steps nor epochs is given: one pass over the data".to_string()));
        }
        notices.extend(check::check(&config, &reader)?);
        for key in keys {
            let path = key.path();
            match tree.get(key.section, key.name).map(|node| &node.place) {
                Some(Place::Set(argument)) => reasons.push((path, format!("{SET}{argument}"))),
                None if !reasons.iter().any(|(known, _)| *known == path) => reasons.push((path, "default".to_string())),
                _ => {}
            }
        }
        Ok(Resolved { config, reasons, notices, absent, origin: origin.to_path_buf() })
    }
}

/// Whether the files that a configuration names must be here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Files {
    /// They are read.
    Needed,
    /// Nothing is read of them: what is planned may run elsewhere.
    Unneeded,
}

/// The text of a configuration file.
fn read(path: &Path) -> Result<String> {
    let io = Error::no_configuration(path);
    let bytes = std::fs::metadata(path).map_err(&io)?.len();
    let syntax = |message| Error::Syntax { origin: path.display().to_string(), message };
    if bytes > MAX_BYTES {
        return Err(syntax(format!("{bytes} bytes; a configuration has at most {MAX_BYTES}")));
    }
    String::from_utf8(std::fs::read(path).map_err(io)?).map_err(|e| syntax(format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// `steps` and `epochs` exclude each other; one from the command line sets the file's other one aside.
fn set_aside(tree: &mut Tree) -> Vec<String> {
    let mut notices = Vec::new();
    for (wins, loses) in [("steps", "epochs"), ("epochs", "steps")] {
        let from_file = |name| tree.get("train", name).map(|node| matches!(node.place, Place::Line(_)));
        if from_file(wins) == Some(false) && from_file(loses) == Some(true) {
            tree.remove("train", loses);
            notices.push(format!("train.{loses} of the file is set aside: --set gives train.{wins}"));
        }
    }
    notices
}

/// The folder that relative paths start from.
fn folder_of(origin: &Path) -> Result<PathBuf> {
    let file = std::path::absolute(origin).map_err(Error::no_configuration(origin))?;
    Ok(file.parent().unwrap_or(Path::new("/")).to_path_buf())
}

/// Finds the paths of a configuration.
struct Paths<'a> {
    reader: &'a Reader<'a>,
    /// Absolute, so that a resolved path means the same wherever it is used.
    folder: PathBuf,
    files: Files,
    reasons: Vec<(String, String)>,
    absent: Vec<PathBuf>,
}

impl Paths<'_> {
    fn resolve(&mut self, config: &mut Config, origin: &Path) -> Result<()> {
        config.model.path = self.model("path", &config.model.path)?;
        if let Some(tokenizer) = &config.model.tokenizer {
            config.model.tokenizer = Some(self.model("tokenizer", tokenizer)?);
        }
        self.sources("train", &mut config.data.train)?;
        self.sources("eval", &mut config.data.eval)?;
        if let Template::File(path) = &mut config.data.template {
            *path = self.existing("template", path)?;
        }
        match &mut config.data.cache_dir {
            Some(dir) => *dir = self.place(dir),
            None if !self.reader.given("data", "cache_dir") => {
                let (dir, why) = default_cache();
                config.data.cache_dir = dir;
                self.reason("data.cache_dir", why);
            }
            None => {}
        }
        if !self.reader.given("log", "dir") {
            let name = origin.file_stem().unwrap_or("run".as_ref());
            config.log.dir = Path::new("runs").join(name);
            self.reason("log.dir", "runs/ and the name of the configuration file");
        }
        config.log.dir = self.place(&config.log.dir);
        Ok(())
    }

    /// A folder relative to the configuration, else a Hub id, else an error.
    fn model(&mut self, key: &str, written: &str) -> Result<String> {
        let path = self.place(Path::new(written));
        if path.is_dir() {
            return match path.to_str() {
                Some(text) => Ok(text.to_string()),
                None => Err(self.reader.error("model", key, format!("{} is not UTF-8", path.display()), "Rename the folder.")),
            };
        }
        if is_hub_id(written) {
            self.reason(&format!("model.{key}"), format!("there is no folder {}: a model of the Hub", path.display()));
            return Ok(written.to_string());
        }
        if self.files == Files::Unneeded {
            return Ok(written.to_string());
        }
        let found = format!("there is no folder {}", path.display());
        Err(self.reader.error("model", key, found, "Give a folder, relative to the configuration file, or a Hub id owner/name."))
    }

    fn sources(&mut self, key: &str, sources: &mut [Source]) -> Result<()> {
        for source in sources {
            source.path = self.existing(key, &source.path)?;
        }
        Ok(())
    }

    fn existing(&mut self, key: &str, written: &Path) -> Result<PathBuf> {
        let path = self.place(written);
        if path.is_file() {
            return Ok(path);
        }
        if self.files == Files::Unneeded {
            self.absent.push(path.clone());
            return Ok(path);
        }
        let found =
            if path.exists() { format!("{} is not a file", path.display()) } else { format!("there is no file {}", path.display()) };
        Err(self.reader.error("data", key, found, "Correct the path; it is relative to the configuration file."))
    }

    /// `written` seen from the configuration's folder; `~/` is the home folder.
    fn place(&self, written: &Path) -> PathBuf {
        match (written.strip_prefix("~"), home()) {
            (Ok(rest), Some(home)) => home.join(rest),
            _ => self.folder.join(written),
        }
    }

    fn reason(&mut self, key: &str, why: impl Into<String>) {
        self.reasons.push((key.to_string(), why.into()));
    }
}

impl crate::config::Model {
    /// Whether `path` is a Hub id rather than a folder.
    pub fn path_is_hub_id(&self) -> bool {
        is_hub_id(&self.path)
    }

    /// Whether `tokenizer` is given and is a Hub id rather than a folder.
    pub fn tokenizer_is_hub_id(&self) -> bool {
        self.tokenizer.as_deref().is_some_and(is_hub_id)
    }
}

/// Whether text has the shape `owner/name` of the Hub.
pub fn is_hub_id(text: &str) -> bool {
    let part = |s: &str| {
        s.len() <= 96
            && s.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && s.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
            && !s.contains("..")
    };
    text.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

fn home() -> Option<PathBuf> {
    std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from)
}

fn default_cache() -> (Option<PathBuf>, &'static str) {
    match std::env::var_os("XDG_CACHE_HOME").filter(|dir| Path::new(dir).is_absolute()) {
        Some(dir) => (Some(PathBuf::from(dir).join("temper")), "$XDG_CACHE_HOME/temper"),
        None => match home() {
            Some(home) => (Some(home.join(".cache").join("temper")), "~/.cache/temper"),
            None => (None, "off: neither XDG_CACHE_HOME nor HOME is set"),
        },
    }
}
