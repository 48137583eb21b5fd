//! Running the binary as a user does: in a folder of one's own, with a deadline, exit code and output checked.

use serde_json::Value;
use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// No command of these tests takes longer, however slow the machine: past this it hangs.
const DEADLINE: Duration = Duration::from_secs(120);

/// The package's folder.
pub const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// What a command did.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    /// The command succeeded.
    #[track_caller]
    pub fn ok(self) -> Done {
        self.exits(0)
    }

    /// The command ended with this exit code.
    #[track_caller]
    pub fn exits(self, code: i32) -> Done {
        assert_eq!(self.code, code, "{self:#?}");
        self
    }

    /// The command said each of these texts.
    #[track_caller]
    pub fn says(self, texts: &[&str]) -> Done {
        for text in texts {
            assert!(self.stdout.contains(text) || self.stderr.contains(text), "{text:?} is not said: {self:#?}");
        }
        self
    }

    /// Stdout as one JSON value.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:#?}"))
    }

    /// Stdout as JSON lines.
    #[track_caller]
    pub fn lines(&self) -> Vec<Value> {
        self.stdout.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
    }
}

/// A command of the binary, to be run in `dir`, that sees neither the user's cache nor the network.
pub fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_temper"));
    command.args(args).current_dir(dir);
    isolated(&mut command, dir);
    command
}

fn isolated(command: &mut Command, dir: &Path) {
    command
        .env("XDG_CACHE_HOME", dir.join(".cache"))
        .env("HF_HUB_OFFLINE", "1")
        .env("CUDA_VISIBLE_DEVICES", "")
        .env_remove("TEMPER_LOG")
        .env("NO_COLOR", "1");
}

/// A command as a shell starts it, by a script in which `"$0" "$@"` is the command.
pub fn in_shell(script: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(command.get_program()).args(command.get_args());
    if let Some(dir) = command.get_current_dir() {
        shell.current_dir(dir);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

/// Runs a command to its end.
#[track_caller]
pub fn finish(mut command: Command) -> Done {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, stderr) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = wait(&mut child);
    let done = Done { code: status.unwrap_or(-1), stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() };
    assert!(status.is_some(), "ended by a signal, or at the deadline: {done:#?}");
    assert!(!done.stderr.contains("panicked"), "{done:#?}");
    done
}

/// Reads a stream to its end.
pub fn drain(stream: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        stream.unwrap().read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The exit code; none after a signal. A child that is late is killed.
pub fn wait(child: &mut Child) -> Option<i32> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if start.elapsed() > DEADLINE {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A folder to work in: `dir`, and beside it `common/` with the tiny model and its tokenizer.
pub struct Case {
    pub dir: PathBuf,
    _tmp: TempDir,
}

impl Case {
    /// The files of a case from the list of public bug reports, gathered from the packages that keep them.
    pub fn new(name: &str) -> Case {
        let tmp = tempfile::tempdir().unwrap();
        let case = Case { dir: tmp.path().canonicalize().unwrap().join(name), _tmp: tmp };
        fs::create_dir(&case.dir).unwrap();
        for home in ["tests/cases", "../data/tests/cases"] {
            for part in [name, "common"] {
                let from = Path::new(HERE).join(home).join(part);
                if from.exists() {
                    copy(&from, &case.dir.with_file_name(part));
                }
            }
        }
        case
    }

    /// The tiny model, `chat.jsonl` with twelve chats, and `config.toml`: four steps, three of them an epoch.
    pub fn tiny() -> Case {
        let case = Case::new("work");
        fs::copy(Path::new(HERE).join("../data/tests/cases/33-resume-data-and-lr/data.jsonl"), case.dir.join("chat.jsonl")).unwrap();
        case.config("chat.jsonl");
        case
    }

    /// Writes `config.toml`: the tiny model on a data file.
    pub fn config(&self, train: &str) {
        let text = format!(
            "[model]\npath = \"../common/tiny-qwen3\"\n[data]\ntrain = [\"{train}\"]\nseq_len = 256\n\
             [train]\nsteps = 4\nglobal_batch = 4\nmicro_batch = 2\nseed = 5\n[optim]\nlr = 1e-3\n[log]\ndir = \"run\"\n"
        );
        self.write("config.toml", &text);
    }

    /// A file of the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Whether a file is there.
    pub fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// Writes a file.
    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    /// Reads a file as text.
    #[track_caller]
    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Reads a file as JSON.
    #[track_caller]
    pub fn json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }

    /// Runs the binary in the folder.
    #[track_caller]
    pub fn temper(&self, args: &[&str]) -> Done {
        finish(command(&self.dir, args))
    }

    /// The arguments of a training run with keys set.
    pub fn sft_args<'a>(config: &'a str, sets: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
        let sets = sets.iter().flat_map(|s| ["--set", *s]);
        ["sft", config].into_iter().chain(sets).chain(more.iter().copied()).collect()
    }

    /// Trains.
    #[track_caller]
    pub fn sft(&self, config: &str, sets: &[&str]) -> Done {
        self.temper(&Case::sft_args(config, sets, &[]))
    }

    /// Goes on with a run.
    #[track_caller]
    pub fn resume(&self, config: &str, sets: &[&str]) -> Done {
        self.temper(&Case::sft_args(config, sets, &["--resume"]))
    }

    /// A shell script in the folder; `$TEMPER` is the binary.
    #[track_caller]
    pub fn shell(&self, script: &str) -> Done {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(&self.dir).env("TEMPER", env!("CARGO_BIN_EXE_temper"));
        isolated(&mut command, &self.dir);
        finish(command)
    }

    /// The events of a run.
    #[track_caller]
    pub fn events(&self, run: &str) -> Vec<Value> {
        self.read(&format!("{run}/events.jsonl")).lines().map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    /// The training steps of a run.
    #[track_caller]
    pub fn steps(&self, run: &str) -> Vec<Value> {
        self.events(run).into_iter().filter(|e| e["event"] == "step").collect()
    }

    /// The messages of a run's notices.
    #[track_caller]
    pub fn notices(&self, run: &str) -> String {
        let events = self.events(run);
        let messages = events.iter().filter(|e| e["event"] == "notice").map(|e| e["message"].as_str().unwrap());
        messages.collect::<Vec<_>>().join("\n")
    }

    /// The numbers of the checkpoints of a run.
    pub fn checkpoints(&self, run: &str) -> Vec<usize> {
        let dir = self.path(&format!("{run}/checkpoints"));
        let names = if dir.exists() { names(&dir) } else { Vec::new() };
        names.iter().filter_map(|n| n.strip_prefix("step-")?.parse().ok()).collect()
    }
}

/// Names of a folder's entries, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let mut found: Vec<String> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    found
}

/// Every file below a folder with its bytes, sorted by path.
pub fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for name in names(dir) {
        let path = dir.join(name);
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.push((path.clone(), fs::read(path).unwrap()));
        }
    }
    found
}

/// Copies a file, or a folder into one that may be there.
pub fn copy(from: &Path, to: &Path) {
    if !from.is_dir() {
        fs::copy(from, to).unwrap();
        return;
    }
    fs::create_dir_all(to).unwrap();
    for name in names(from) {
        copy(&from.join(&name), &to.join(&name));
    }
}

/// What of a step does not depend on the clock.
pub fn essence(step: &Value) -> Vec<Value> {
    ["step", "loss", "grad_norm", "lr", "tokens", "trained_tokens"].iter().map(|k| step[*k].clone()).collect()
}

/// [`essence`] of all steps.
pub fn essences(steps: &[Value]) -> Vec<Vec<Value>> {
    steps.iter().map(essence).collect()
}

/// The values of a key in all steps.
pub fn column(steps: &[Value], key: &str) -> Vec<f64> {
    steps.iter().map(|s| s[key].as_f64().unwrap()).collect()
}

/// Numbers equal within a relative tolerance.
#[track_caller]
pub fn close(got: &[f64], want: &[f64], tolerance: f64) {
    let near = got.len() == want.len() && got.iter().zip(want).all(|(g, w)| (g - w).abs() <= tolerance * w.abs());
    assert!(near, "{got:?}, expected {want:?}");
}

/// Material that is not part of the repository; `None` (said aloud) where it is absent.
pub fn shared(sub: &str) -> Option<PathBuf> {
    let path = Path::new(HERE).join("../../../shared").join(sub);
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED: {} is not there", path.display());
    None
}
