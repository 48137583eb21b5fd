//! One rank of a job: its word to its supervisor, if it has one, and its link to the other ranks.

use crate::backend::Backend;
use crate::exit::{self, Told};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};
use temper_cluster::{Failed, Fingerprint, Kind, Rendezvous, Worker};
use temper_comm::{HostWorld, Solo, Tcp, World, tcp};
use temper_config::Resolved;
use temper_train::events::{Event, Sink};

/// Exit code of a panic, Rust's own.
const PANICKED: u8 = 101;
/// How long the slowest rank may take to read model and data before all compare what they run with.
const PREFLIGHT: Duration = Duration::from_secs(1800);
/// Files of a model folder by which ranks compare it; of the weights themselves only names and sizes count.
const MODEL_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "model.safetensors.index.json",
];

/// One rank.
pub struct Rank {
    me: Rendezvous,
    worker: Option<Arc<Worker>>,
    host: OnceLock<HostWorld>,
}

impl Rank {
    /// The only rank of a job without a supervisor.
    pub fn only() -> Rank {
        Rank::new(Rendezvous { rank: 0, size: 1, local_rank: 0, master: String::new() }, None)
    }

    /// A rank that another launcher started.
    pub fn unsupervised(me: Rendezvous) -> Rank {
        Rank::new(me, None)
    }

    fn new(me: Rendezvous, worker: Option<Arc<Worker>>) -> Rank {
        Rank { me, worker, host: OnceLock::new() }
    }

    /// Whether this rank speaks for the job: to the screen, to the run folder.
    pub fn speaks(&self) -> bool {
        self.me.rank == 0
    }

    /// Whether it is the only one.
    pub fn is_alone(&self) -> bool {
        self.me.size == 1
    }

    /// Its number among them.
    pub fn rank(&self) -> usize {
        self.me.rank
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> usize {
        self.me.size
    }

    /// Its GPU among those of the host.
    pub fn local_rank(&self) -> usize {
        self.me.local_rank
    }

    /// Whether a supervisor shows what happens.
    pub fn is_supervised(&self) -> bool {
        self.worker.is_some()
    }

    /// Whether the supervisor wants the run to go on from its last checkpoint.
    pub fn resumes(&self) -> bool {
        self.worker.as_ref().is_some_and(|w| w.resume())
    }

    /// Says what it does.
    pub fn doing(&self, phase: &str) {
        if let Some(worker) = &self.worker {
            worker.doing(phase, None);
        }
    }

    /// Everything is read and the run folder is there.
    pub fn ready(&self) {
        if let Some(worker) = &self.worker {
            worker.ready();
        }
    }

    /// Tells the supervisor of every step.
    pub fn beats(&self) -> Option<impl Sink + 'static> {
        self.worker.clone().map(Beats)
    }

    /// Compares with the other ranks what they run with, then joins them.
    ///
    /// # Errors
    /// When a rank runs with something else, does not come or cannot be reached.
    pub fn join(&self, resolved: &Resolved, backend: &Backend, patience: Duration) -> anyhow::Result<Box<dyn World>> {
        let print = fingerprint(resolved, backend);
        let words = print.digest();
        if let Some(worker) = &self.worker {
            self.doing("waiting for the other ranks to be ready");
            worker.preflight(print, PREFLIGHT)?;
        }
        if self.is_alone() {
            return Ok(Box::new(Solo));
        }
        self.doing("joining the other ranks");
        let job = self.worker.as_ref().map_or_else(|| self.me.master.clone(), |w| w.job());
        let (rank, size, master) = (self.me.rank, self.me.size, self.me.master.as_str());
        let host = tcp(&Tcp { rank, size, master, job: &job, fingerprint: &words, announce: None, patience })?;
        if let Some(worker) = &self.worker {
            let recorder = host.recorder().clone();
            worker.standing(Box::new(move || Some(recorder.standing().to_string())));
        }
        let host = self.host.get_or_init(|| host).clone();
        Ok(backend.join(host)?)
    }

    /// Tells the others why this rank leaves, if it fails.
    pub fn give_up(&self, error: &anyhow::Error) {
        if let Some(host) = self.host.get() {
            host.give_up(&error.to_string());
        }
    }
}

/// Runs `work` as the worker that the environment makes this process. The supervisor is told how it ended, and shows it.
///
/// # Errors
/// With the exit code alone when the supervisor knows the rest.
pub fn supervised(work: impl FnOnce(&Rank) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let me = Rendezvous::from_env().map_err(temper_cluster::Error::from)?;
    let me = me.ok_or_else(|| exit::BadInput(format!("{} is set, but RANK is not: unset it", temper_cluster::SUPERVISOR)))?;
    let Some(worker) = Worker::from_env(me.local_rank)? else { return work(&Rank::unsupervised(me)) };
    let worker = Arc::new(worker);
    let rank = Rank::new(me, Some(worker.clone()));
    let panicked = note_panics();
    let result = catch_unwind(AssertUnwindSafe(|| work(&rank).inspect_err(|e| rank.give_up(e))));
    let failed = match result {
        Ok(Ok(())) => {
            worker.done();
            return Ok(());
        }
        Ok(Err(error)) => {
            let (message, kind) = words(rank.me.rank, &error);
            Failed { message, code: exit::code_of(&error), kind }
        }
        Err(_) => {
            let what = panicked.lock().unwrap_or_else(PoisonError::into_inner).clone();
            Failed { message: format!("this is a bug in temper: {what}"), code: PANICKED, kind: Kind::Own }
        }
    };
    let (message, code) = (failed.message.clone(), failed.code);
    if !worker.failed(failed) {
        crate::out::tell(format_args!("error: {message}"));
    }
    Err(Told(code).into())
}

/// Keeps the words of the last panic, beside what is printed of it anyway.
fn note_panics() -> Arc<Mutex<String>> {
    let last = Arc::<Mutex<String>>::default();
    let (note, usual) = (last.clone(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |info| {
        *note.lock().unwrap_or_else(PoisonError::into_inner) = info.to_string();
        usual(info);
    }));
    last
}

/// What rank `me` says of an error, and whose fault it is.
fn words(me: usize, error: &anyhow::Error) -> (String, Kind) {
    use temper_checkpoint::{Class, Error as Checkpoint};
    use temper_train::Error as Train;
    let comm = match error.downcast_ref() {
        Some(Train::Interrupted { .. }) => return (error.to_string(), Kind::Interrupted),
        Some(Train::Diverged(_)) => return (error.to_string(), Kind::Lasting),
        Some(Train::Checkpoint(Checkpoint::OfRank { rank, class, message })) => {
            let kind = match class {
                _ if *rank == me => Kind::Own,
                Class::Lost => Kind::Secondary { of: *rank },
                Class::Failed | Class::BadInput | Class::NotWhole => Kind::Passed { of: *rank },
            };
            return (message.clone(), kind);
        }
        Some(Train::Model(temper_model::Error::Comm(e)) | Train::Checkpoint(Checkpoint::Comm(e))) => Some(e),
        _ => error.downcast_ref::<temper_comm::Error>(),
    };
    let kind = match comm {
        Some(temper_comm::Error::Lost { from, .. } | temper_comm::Error::Timeout { from, .. }) => Kind::Secondary { of: *from },
        _ => Kind::Own,
    };
    (error.to_string(), kind)
}

/// What a rank runs with: the program, the configuration by key, the model's and the data's files, the libraries' variables.
fn fingerprint(resolved: &Resolved, backend: &Backend) -> Fingerprint {
    let mut print = Fingerprint::of_process(env!("CARGO_PKG_VERSION"));
    print.must("device", backend.ops.name().split(',').next().unwrap_or_default());
    if let Ok(driver) = std::fs::read_to_string("/proc/driver/nvidia/version") {
        print.should("NVIDIA driver", driver.lines().next().unwrap_or_default());
    }
    let mut config = serde_json::to_value(&resolved.config).unwrap_or_default();
    if let Some(data) = config.get_mut("data").and_then(|d| d.as_object_mut()) {
        for of_the_host in ["cache_dir", "workers"] {
            data.remove(of_the_host);
        }
    }
    print.tree("config", &config);
    let config = &resolved.config;
    let folders = [Some(&config.model.path), config.model.tokenizer.as_ref()];
    for (name, folder) in ["model", "tokenizer"].into_iter().zip(folders) {
        if let Some(folder) = folder.map(Path::new).filter(|f| f.is_dir()) {
            model_files(&mut print, name, folder);
        }
    }
    for (n, source) in config.data.train.iter().enumerate() {
        print.file(&format!("data.train, file {}", n + 1), &source.path);
    }
    for (n, source) in config.data.eval.iter().enumerate() {
        print.file(&format!("data.eval, file {}", n + 1), &source.path);
    }
    print
}

fn model_files(print: &mut Fingerprint, name: &str, folder: &Path) {
    for file in MODEL_FILES.iter().filter(|f| folder.join(f).exists()) {
        print.file(&format!("{name}/{file}"), &folder.join(file));
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "safetensors")) {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        print.must(&format!("{name}/{file}"), std::fs::metadata(&path).map_or_else(|e| e.to_string(), |m| format!("{} bytes", m.len())));
    }
}

/// Tells the supervisor which step is under way.
struct Beats(Arc<Worker>);

impl Sink for Beats {
    fn event(&mut self, event: &Event) {
        match event {
            Event::Start(start) => self.0.doing("training", Some(start.step as u64)),
            Event::Step(step) => self.0.doing("training", Some(step.step as u64 + 1)),
            Event::End(_) => self.0.doing("ending", None),
            Event::Eval(_) | Event::Checkpoint(_) | Event::Notice(_) => {}
        }
    }
}
