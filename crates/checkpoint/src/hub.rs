//! Models by Hub id, through the cache that other Hugging Face programs use.
//!
//! All files of a model are taken from one commit; the name of the branch is written to the cache last, so that a download
//! cut short is never mistaken for a model.

use crate::{
    Error, Result,
    folder::{INDEX, SINGLE, shards_named_by},
    sidecar::{CONFIG, GENERATION, TOKENIZER},
};
use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        Progress, RepoInfo,
        sync::{Api, ApiBuilder, ApiError, ApiRepo},
    },
};
use std::{
    cell::Cell,
    fs,
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
/// Attempts at one file; each goes on where the one before broke off.
const ATTEMPTS: usize = 3;

/// The folder of a model: `spec` as a folder relative to `base` if there is one, else as a Hub id `owner/name`, downloaded
/// unless it is in the cache. Without `weights` only config and tokenizer files are fetched.
///
/// # Errors
/// [`Error::Bad`] when it is neither a folder nor an id; [`Error::Hub`] as [`Hub::model`].
pub fn resolve_model(spec: &str, base: &Path, revision: &str, weights: bool) -> Result<PathBuf> {
    let path = base.join(spec);
    if path.is_dir() {
        let (run, has) = (path.join("events.jsonl"), |dir: &Path| dir.join("config.json").is_file());
        if !has(&path) && (run.is_file() || has(&path.join("hf"))) {
            let hint = "is a run folder; the model it trained is its hf/ (written at the end of the run, or by temper checkpoint export)";
            return Err(Error::bad(&path, hint));
        }
        return Ok(path);
    }
    if path.exists() {
        return Err(Error::bad(&path, "is a file; name the folder that holds config.json and the weights"));
    }
    if !is_id(spec) {
        return Err(Error::bad(&path, "no such folder, and not a Hub id (owner/name) either"));
    }
    Hub::from_env().model(spec, revision, weights).map_err(|e| match e {
        // What looks like an id may have been meant as a folder.
        Error::Hub { id, endpoint, message, remedy, bad_input } => {
            let message = format!("there is no folder {}, and from the Hub: {message}", path.display());
            Error::Hub { id, endpoint, message, remedy, bad_input }
        }
        other => other,
    })
}

/// `owner/name`, of the characters that the Hub allows.
fn is_id(spec: &str) -> bool {
    let part = |s: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !s.is_empty() && s.len() <= 96 && s.chars().all(allowed) && !s.starts_with(['.', '-']) && !s.contains("..")
    };
    spec.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

/// Access to a Hub and its cache on this machine.
#[derive(Clone, Debug)]
pub struct Hub {
    /// The server, without a slash at its end.
    pub endpoint: String,
    /// Folder of the cache (`models--owner--name/…`).
    pub cache: PathBuf,
    /// Access token.
    pub token: Option<String>,
    /// Use the cache only.
    pub offline: bool,
}

impl Hub {
    /// As the environment says: `HF_ENDPOINT`; `HF_HUB_CACHE`, `HF_HOME` or `XDG_CACHE_HOME`; `HF_TOKEN` or the file that
    /// `hf auth login` writes; `HF_HUB_OFFLINE`.
    pub fn from_env() -> Hub {
        Hub::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`Hub::from_env`], with the variables from a function.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Hub {
        let var = |name: &str| var(name).filter(|v| !v.is_empty());
        let home = var("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let user = || PathBuf::from(var("HOME").unwrap_or_else(|| ".".into())).join(".cache");
            var("XDG_CACHE_HOME").map_or_else(user, PathBuf::from).join("huggingface")
        });
        let stored = || {
            let path = var("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
            fs::read_to_string(path).ok().map(|t| t.trim().to_string()).filter(|t| !t.is_empty())
        };
        let on = |name| var(name).is_some_and(|v| ["1", "ON", "YES", "TRUE"].contains(&v.to_uppercase().as_str()));
        Hub {
            endpoint: var("HF_ENDPOINT").as_deref().unwrap_or(DEFAULT_ENDPOINT).trim_end_matches('/').to_string(),
            token: var("HF_TOKEN").or_else(stored),
            offline: on("HF_HUB_OFFLINE") || on("TRANSFORMERS_OFFLINE"),
            cache: var("HF_HUB_CACHE").or_else(|| var("HUGGINGFACE_HUB_CACHE")).map_or_else(|| home.join("hub"), PathBuf::from),
        }
    }

    /// The folder of a model in the cache, downloaded as far as it is not there. When the server cannot be reached, a
    /// complete earlier download of the same revision is used with a warning.
    ///
    /// # Errors
    /// [`Error::Hub`], naming the id, the server and the remedy: no such model or revision, no access, no network, no
    /// safetensors weights, not in the cache while offline.
    pub fn model(&self, id: &str, revision: &str, weights: bool) -> Result<PathBuf> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if revision.is_empty() || revision.contains("..") || revision.starts_with('/') || !revision.chars().all(plain) {
            return Err(self.error(id, format!("{revision:?} is not the name of a revision"), "Correct model.revision", true));
        }
        let cached = self.cached(id, revision, weights);
        if self.offline {
            return cached.map_err(|why| {
                self.error(id, format!("offline, and {why}"), "Unset HF_HUB_OFFLINE to download it, or name a local folder", true)
            });
        }
        if let (Ok(snapshot), true) = (&cached, is_commit(revision)) {
            return Ok(snapshot.clone());
        }
        match self.download(id, revision, weights) {
            Err(Error::Hub { message, bad_input: false, .. }) if cached.is_ok() => {
                tracing::warn!("{id}: {message} (Hub endpoint {}); using the copy in {}", self.endpoint, self.cache.display());
                cached.map_err(|why| self.error(id, why, "", false))
            }
            other => other,
        }
    }

    /// The snapshot of a revision if all that is wanted of it is in the cache, else what is missing.
    fn cached(&self, id: &str, revision: &str, weights: bool) -> std::result::Result<PathBuf, String> {
        let folder = self.cache.join(Repo::model(id.to_string()).folder_name());
        let commit = match fs::read_to_string(folder.join("refs").join(revision)) {
            Ok(commit) => commit.trim().to_string(),
            Err(_) if is_commit(revision) => revision.to_string(),
            Err(_) => return Err(format!("revision {revision} is not in {}", self.cache.display())),
        };
        let snapshot = folder.join("snapshots").join(&commit);
        let mut wanted = vec![CONFIG.to_string()];
        if weights {
            match snapshot.join(INDEX).exists() {
                true => wanted.extend(shards_named_by(&snapshot.join(INDEX)).map_err(|e| e.to_string())?),
                false => wanted.push(SINGLE.to_string()),
            }
        }
        match wanted.iter().find(|name| !snapshot.join(name).exists()) {
            None => Ok(snapshot),
            Some(missing) => Err(format!("{missing} is not in {}", snapshot.display())),
        }
    }

    fn download(&self, id: &str, revision: &str, weights: bool) -> Result<PathBuf> {
        let cache = Cache::new(self.cache.clone());
        let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(self.endpoint.clone());
        let api = builder.with_token(self.token.clone()).with_progress(false).build().map_err(|e| self.api_error(id, CONFIG, &e))?;
        let named = Repo::with_revision(id.to_string(), RepoType::Model, revision.to_string());
        let info = self.info(&api, id, revision, &named)?;
        let fetch = Fetch {
            hub: self,
            id,
            repo: api.repo(Repo::with_revision(id.to_string(), RepoType::Model, info.sha.clone())),
            api: &api,
            cache: &cache,
            snapshot: cache.repo(named.clone()).pointer_path(&info.sha),
        };
        let has = |name: &str| info.siblings.iter().any(|s| s.rfilename == name);
        let side = |name: &&str| [CONFIG, GENERATION].contains(name) || TOKENIZER.contains(name) || is_named_template(name);
        for name in info.siblings.iter().map(|s| s.rfilename.as_str()).filter(side) {
            fetch.file(name)?;
        }
        if weights && has(INDEX) {
            fetch.file(INDEX)?;
            for shard in shards_named_by(&fetch.snapshot.join(INDEX))? {
                fetch.file(&shard)?;
            }
        } else if weights && has(SINGLE) {
            fetch.file(SINGLE)?;
        } else if weights {
            let message = format!("the model has no {SINGLE} and no {INDEX}");
            return Err(self.error(id, message, "Choose a revision or a model with safetensors weights", true));
        }
        if revision != info.sha {
            cache.repo(named).create_ref(&info.sha).map_err(Error::io("write", &self.cache))?;
        }
        Ok(fetch.snapshot)
    }

    /// Commit and files of a revision.
    fn info(&self, api: &Api, id: &str, revision: &str, repo: &Repo) -> Result<RepoInfo> {
        let request = api.repo(repo.clone()).info_request().config();
        let request = request.timeout_connect(Some(Duration::from_secs(10))).timeout_recv_response(Some(Duration::from_secs(30))).build();
        let info: std::result::Result<RepoInfo, ureq::Error> = request.call().and_then(|mut r| r.body_mut().read_json());
        let info = info.map_err(|e| match e {
            ureq::Error::StatusCode(404) => {
                self.error(id, format!("no such model, or no revision {revision}"), "Check the spelling and model.revision", true)
            }
            e => self.api_error(id, CONFIG, &ApiError::RequestError(Box::new(e))),
        })?;
        if !is_commit(&info.sha) {
            return Err(self.error(id, format!("the server names {:?} as the commit", info.sha), "Check HF_ENDPOINT", false));
        }
        Ok(info)
    }

    fn error(&self, id: &str, message: impl Into<String>, remedy: &str, bad_input: bool) -> Error {
        let (id, endpoint) = (id.to_string(), self.endpoint.clone());
        Error::Hub { id, endpoint, message: message.into(), remedy: remedy.to_string(), bad_input }
    }

    fn api_error(&self, id: &str, file: &str, e: &ApiError) -> Error {
        let status = match e {
            ApiError::RequestError(e) => match **e {
                ureq::Error::StatusCode(status) => Some(status),
                _ => None,
            },
            _ => None,
        };
        match status {
            Some(401 | 403) if self.token.is_some() => {
                let remedy = "Check the spelling; accept the model's terms on its page if it is gated; check that the token may read it";
                self.error(id, format!("no access to {file} with the token given"), remedy, true)
            }
            Some(401 | 403) => {
                let remedy = "Check the spelling; for a private or gated model set HF_TOKEN to an access token";
                self.error(id, format!("no access to {file} without a token, or no such model"), remedy, true)
            }
            Some(404) => self.error(id, format!("{file} is not there"), "Check the spelling and model.revision", true),
            Some(status) => self.error(id, format!("{file}: the server answered {status}"), "Try again later", false),
            None => {
                let remedy = "Check the network and HF_ENDPOINT, or name a local folder; a download goes on where it broke off";
                self.error(id, format!("{file}: {e}"), remedy, false)
            }
        }
    }
}

/// A 40-digit commit id.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// `additional_chat_templates/NAME.jinja`.
fn is_named_template(name: &str) -> bool {
    let file = name.strip_prefix("additional_chat_templates/");
    file.is_some_and(|f| f.ends_with(".jinja") && !f.contains(['/', '\\']))
}

/// The files of one commit on their way into the cache.
struct Fetch<'a> {
    hub: &'a Hub,
    id: &'a str,
    api: &'a Api,
    repo: ApiRepo,
    cache: &'a Cache,
    snapshot: PathBuf,
}

impl Fetch<'_> {
    /// Downloads a file unless the snapshot has it.
    fn file(&self, name: &str) -> Result<()> {
        if self.snapshot.join(name).exists() {
            return Ok(());
        }
        let mut attempt = 1;
        loop {
            match self.attempt(name) {
                Err(Error::Hub { bad_input: false, message, .. }) if attempt < ATTEMPTS => {
                    tracing::warn!("{}: {message}; trying again", self.id);
                    attempt += 1;
                }
                other => return other,
            }
        }
    }

    fn attempt(&self, name: &str) -> Result<()> {
        let size = Rc::new(Cell::new(0));
        let progress = Report { name: name.to_string(), size: size.clone(), done: 0, said: Instant::now() };
        let path = match self.repo.download_with_progress(name, progress) {
            Ok(path) => path,
            Err(e) => {
                self.drop_overgrown_part(name);
                return Err(self.hub.api_error(self.id, name, &e));
            }
        };
        // The library compares nothing, so a body that ends early or comes twice shows here only.
        let length = fs::metadata(&path).map_err(Error::io("read", &path))?.len();
        if length == size.get() {
            return Ok(());
        }
        if let Ok(blob) = path.canonicalize() {
            let _ = fs::remove_file(blob);
        }
        let _ = fs::remove_file(&path);
        let message = format!("{name} came with {length} bytes instead of {}", size.get());
        Err(self.hub.error(self.id, message, "Try again; if it persists, check HF_ENDPOINT", false))
    }

    /// A partial file as long as the whole one or longer can never be completed.
    fn drop_overgrown_part(&self, name: &str) {
        let Ok(meta) = self.api.metadata(&self.repo.url(name)) else { return };
        let repo = Repo::model(self.id.to_string());
        let part = self.cache.repo(repo).blob_path(meta.etag()).with_extension("part");
        if fs::metadata(&part).is_ok_and(|m| m.len() >= meta.size() as u64) {
            let _ = fs::remove_file(part);
        }
    }
}

/// Tells the log about a download, every few seconds.
struct Report {
    name: String,
    size: Rc<Cell<u64>>,
    done: u64,
    said: Instant,
}

impl Progress for Report {
    fn init(&mut self, size: usize, _: &str) {
        self.size.set(size as u64);
        self.done = 0;
    }
    fn update(&mut self, bytes: usize) {
        self.done += bytes as u64;
        if self.said.elapsed() > Duration::from_secs(3) {
            self.said = Instant::now();
            tracing::info!("downloading {}: {} of {} MB", self.name, self.done / 1_000_000, self.size.get() / 1_000_000);
        }
    }
    fn finish(&mut self) {
        tracing::info!("downloaded {} ({} MB)", self.name, self.size.get() / 1_000_000);
    }
}
