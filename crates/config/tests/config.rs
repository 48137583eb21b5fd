//! Configuration files: what is accepted, what is refused and in which words.

mod shared;

use shared::{files, shared};
use std::path::{Path, PathBuf};
use temper_config::{Config, FloatType, LossReduction, Resolved, Result, Schedule, Source, Span, Template};

/// A folder with a model folder, data files and a template, and the smallest configuration for them.
struct Setup {
    dir: tempfile::TempDir,
}

const SMALLEST: &str = "[model]\npath = \"m\"\n[data]\ntrain = [\"a.jsonl\"]\n";

impl Setup {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("m")).unwrap();
        for name in ["a.jsonl", "b.jsonl", "t.jinja"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn load(&self, text: &str, sets: &[&str]) -> Result<Resolved> {
        std::fs::write(self.path("run.toml"), text).unwrap();
        Config::load(&self.path("run.toml"), &sets.iter().map(|s| s.to_string()).collect::<Vec<_>>())
    }

    /// The smallest configuration with more text behind it (`[data]` is the open section).
    fn with(&self, more: &str) -> Result<Resolved> {
        self.load(&format!("{SMALLEST}{more}"), &[])
    }
}

#[track_caller]
fn says(result: Result<Resolved>, words: &[&str]) {
    let message = result.unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "\"{word}\" is not in: {message}");
    }
}

fn reason<'a>(resolved: &'a Resolved, key: &str) -> Option<&'a str> {
    resolved.reasons.iter().find(|(k, _)| k == key).map(|(_, why)| why.as_str())
}

#[test]
fn the_smallest_file_takes_the_documented_defaults() {
    let setup = Setup::new();
    let resolved = setup.with("").unwrap();
    let c = &resolved.config;
    assert_eq!((c.model.path.as_str(), c.model.revision.as_str()), (setup.path("m").to_str().unwrap(), "main"));
    assert_eq!(c.data.train, [Source { path: setup.path("a.jsonl"), weight: 1.0 }]);
    assert_eq!((c.data.seq_len, c.data.packing, c.data.max_bad_rows, c.data.eval_split), (2048, false, 0.01, 0.0));
    assert_eq!((c.train.steps, c.train.epochs, c.train.global_batch, c.train.micro_batch, c.train.seed), (None, Some(1.0), 8, 1, 42));
    assert_eq!((c.optim.lr, c.optim.min_lr, c.optim.schedule, c.optim.warmup), (1e-5, 0.0, Schedule::Cosine, Span::Fraction(0.03)));
    assert_eq!((c.optim.betas, c.optim.eps, c.optim.weight_decay, c.optim.clip), ([0.9, 0.95], 1e-8, 0.1, 1.0));
    assert_eq!((c.checkpoint.every, c.checkpoint.keep_last, c.checkpoint.export, c.checkpoint.export_dtype), (500, 3, true, None));
    assert_eq!((c.log.dir.as_path(), c.log.every, c.log.tensorboard), (setup.path("runs/run").as_path(), 1, true));
    assert_eq!(reason(&resolved, "model.path"), None);
    assert_eq!(reason(&resolved, "optim.lr"), Some("default"));
    assert!(reason(&resolved, "train.epochs").unwrap().contains("neither"));
    let json = resolved.to_json();
    assert_eq!(json["config"]["optim"]["lr"], 1e-5);
    assert_eq!(json["reasons"]["log.dir"], "runs/ and the name of the configuration file");
    // Every key is either given or explained.
    for key in Config::keys() {
        let given = ["model.path", "data.train"].contains(&key.path().as_str());
        assert_eq!(reason(&resolved, &key.path()).is_none(), given, "{}", key.path());
    }
}

#[test]
fn the_layout_may_be_left_to_the_planner() {
    let setup = Setup::new();
    let of = |text: &str, sets: &[&str]| {
        let text = format!("{text}\n[model]\npath = 'm'\n[data]\ntrain = 'a.jsonl'\n");
        let resolved = setup.load(&text, sets).unwrap();
        let given = ["auto", "tp", "ep"].map(|key| resolved.gives(&format!("parallel.{key}")));
        (resolved.config.parallel.auto, resolved.config.parallel.tp, given)
    };
    assert_eq!(of("", &[]), (false, 1, [false, false, false]));
    assert_eq!(of("parallel = 'auto'", &[]), (true, 1, [true, false, false]));
    assert_eq!(of("parallel = 'auto'", &["parallel.tp=2"]), (true, 2, [true, true, false]));
    assert_eq!(of("parallel.auto = true\nparallel.ep = 1", &[]), (true, 1, [true, false, true]));
    // Whatever is given is held, in whichever order and place.
    assert_eq!(of("parallel.tp = 4", &["parallel=auto"]), (true, 4, [true, true, false]));
    assert_eq!(of("", &["parallel.tp=2", "parallel=auto"]), (true, 2, [true, true, false]));
    assert_eq!(of("", &["parallel=auto", "parallel.tp=2"]), (true, 2, [true, true, false]));
    assert_eq!(of("parallel.ep = 3", &["parallel.tp=2", "parallel=auto"]), (true, 2, [true, true, true]));
    assert_eq!(of("parallel = 'auto'", &["parallel.tp=2", "parallel.auto=false"]), (false, 2, [true, true, false]));
    let error = setup.load("parallel = 'fast'\n[model]\npath = 'm'\n[data]\ntrain = 'a.jsonl'\n", &[]).unwrap_err().to_string();
    assert!(error.contains("run.toml:1") && error.contains("found \"fast\"") && error.contains("parallel = \"auto\""), "{error}");
}

#[test]
fn every_kind_of_value_is_read() {
    let setup = Setup::new();
    let text = "
        [model]
        path = 'm'
        tokenizer = 'org/name'
        init = 'random'
        [data]
        train = [{ path = 'a.jsonl', weight = 2 }, 'b.jsonl']
        eval = 'b.jsonl'
        template = 't.jinja'
        template_args = { enable_thinking = false, n = [1, 2.5, 'x'], deep = { a = 1 } }
        cache_dir = ''
        loss = 'last'
        over_long = 'split'
        [train]
        steps = 100
        loss_reduction = 'microbatch'
        seed = 18446744073709551615
        [optim]
        lr = 1
        schedule = 'wsd'
        warmup = 10
        decay = 0.5
        betas = [0, 0.5]
        [parallel]
        tp = 1
        dp = 1
        [precision]
        dtype = 'f32'
        [checkpoint]
        export_dtype = 'bf16'
        [log]
        sample_prompt = ''
    ";
    let c = setup.load(text, &[]).unwrap().config;
    assert!(c.model.tokenizer_is_hub_id() && !c.model.path_is_hub_id());
    assert_eq!(c.data.train.iter().map(|s| s.weight).collect::<Vec<_>>(), [2.0, 1.0]);
    assert_eq!(c.data.eval[0].path, setup.path("b.jsonl"));
    assert_eq!(c.data.template, Template::File(setup.path("t.jinja")));
    assert_eq!(serde_json::to_string(&c.data.template_args).unwrap(), r#"{"deep":{"a":1},"enable_thinking":false,"n":[1,2.5,"x"]}"#);
    assert_eq!((c.data.cache_dir, c.train.steps, c.train.epochs, c.train.seed), (None, Some(100), None, u64::MAX));
    assert_eq!(c.train.loss_reduction, LossReduction::Microbatch);
    assert_eq!((c.optim.lr, c.optim.warmup, c.optim.decay, c.optim.betas), (1.0, Span::Steps(10), Span::Fraction(0.5), [0.0, 0.5]));
    assert_eq!((c.precision.dtype, c.checkpoint.export_dtype), (Some(FloatType::Float32), Some(FloatType::Bfloat16)));
    assert_eq!(c.log.sample_prompt.as_deref(), Some(""));
}

#[test]
fn set_lays_values_over_the_file() {
    let setup = Setup::new();
    let text = format!("{SMALLEST}template = 'chatml'\n[train]\nepochs = 2\n[optim]\nlr = 1e-3\n");
    let sets = [
        "optim.lr=2e-4",
        "log.dir=run-b",
        "optim.betas=[0.8, 0.9]",
        "train.steps=7",
        "data.template_args.enable_thinking=false",
        "data.template=qwen3",
        "log.sample_prompt=1 + 1 = ?",
    ];
    let resolved = setup.load(&text, &sets).unwrap();
    let c = &resolved.config;
    assert_eq!((c.optim.lr, c.optim.betas, c.train.steps, c.train.epochs), (2e-4, [0.8, 0.9], Some(7), None));
    assert_eq!((c.log.dir.clone(), c.log.sample_prompt.as_deref()), (setup.path("run-b"), Some("1 + 1 = ?")));
    assert_eq!(c.data.template_args["enable_thinking"], false);
    assert_eq!(c.data.template, Template::Named("qwen3".into()));
    assert_eq!(reason(&resolved, "optim.lr"), Some("--set optim.lr=2e-4"));
    assert!(resolved.notices.iter().any(|n| n.contains("train.epochs")), "{:?}", resolved.notices);
    // Text keys take what looks like something else; a line break cannot smuggle in a second key.
    assert_eq!(setup.load(SMALLEST, &["log.dir=2024"]).unwrap().config.log.dir, setup.path("2024"));
    let smuggled = setup.load(SMALLEST, &["log.sample_prompt=1\nvalue2 = 3"]).unwrap();
    assert_eq!(smuggled.config.log.sample_prompt.as_deref(), Some("1\nvalue2 = 3"));

    says(setup.load(SMALLEST, &["optim.lr"]), &["--set optim.lr", "key=value"]);
    says(setup.load(SMALLEST, &["optim..lr=1"]), &["optim..lr"]);
    says(setup.load(SMALLEST, &["optim.lr=fast"]), &["--set optim.lr=fast", "optim.lr", "found \"fast\"", "number"]);
    says(setup.load(SMALLEST, &["optim.learning_rate=1"]), &["--set", "optim.learning_rate", "optim.lr"]);
    says(setup.load(SMALLEST, &["model.path.x=1"]), &["model.path", "Only a table"]);
    says(setup.load(SMALLEST, &["optim.betas=[0.9"]), &["not TOML"]);
}

#[test]
fn unknown_keys_get_the_nearest_known_one_and_the_line() {
    let setup = Setup::new();
    for (text, words) in [
        ("sec_len = 5", ["run.toml:5", "data.sec_len", "Did you mean data.seq_len?"]),
        ("max_seq_length = 5", ["run.toml:5", "data.max_seq_length", "Did you mean data.seq_len?"]),
        ("lr = 5", ["run.toml:5", "data.lr", "Did you mean optim.lr?"]),
        ("[optim]\nlearning_rate = 1", ["run.toml:6", "optim.learning_rate", "Did you mean optim.lr?"]),
        ("[optim]\nweight-decay = 1", ["run.toml:6", "optim.weight-decay", "Did you mean optim.weight_decay?"]),
        ("[train]\nstep = 1", ["run.toml:6", "train.step", "Did you mean train.steps?"]),
        ("[optimizer]\nlr = 1", ["run.toml:5", "optimizer", "Did you mean [optim]?"]),
        ("[rl]\nn = 1", ["run.toml:5", "rl", "not supported yet"]),
    ] {
        says(setup.with(text), &words);
    }
    says(setup.load("lr = 1", &[]), &["run.toml:1", "lr", "optim.lr", "[optim]"]);
    says(setup.load("model = 1", &[]), &["run.toml:1", "model", "the integer 1", "[model]"]);
}

#[test]
fn wrong_values_name_line_key_value_and_remedy() {
    let setup = Setup::new();
    for (text, words) in [
        ("seq_len = 1", ["run.toml:5: data.seq_len", "found the integer 1", "from 2"]),
        ("seq_len = 2.5", ["data.seq_len", "found the number 2.5", "an integer"]),
        ("packing = 'yes'", ["data.packing", "found \"yes\"", "true or false"]),
        ("loss = 'user'", ["data.loss", "found \"user\"", "\"assistant\", \"last\", \"all\""]),
        ("template = 'vicuna'", ["data.template", "vicuna", "chatml, qwen3, alpaca, llama3"]),
        ("template = 'x.jinja'", ["data.template", "there is no file", "relative"]),
        ("eval = ['x.jsonl']", ["data.eval", "there is no file", "x.jsonl"]),
        ("eval = [{ path = 'b.jsonl', weight = 0 }]", ["data.eval[0].weight", "the integer 0", "above 0"]),
        ("eval = [{ file = 'b.jsonl' }]", ["data.eval[0].file", "unknown", "path and weight"]),
        ("eval_split = 1.0", ["data.eval_split", "1.0", "below 1"]),
        ("template_args = { x = nan }", ["data.template_args", "NaN", "JSON"]),
        ("[train]\nsteps = 0", ["train.steps", "the integer 0", "from 1"]),
        ("[train]\nseed = -1", ["train.seed", "-1", "from 0"]),
        ("[optim]\nlr = nan", ["optim.lr", "NaN", "number"]),
        ("[optim]\nlr = inf", ["optim.lr", "inf", "number"]),
        ("[optim]\nbetas = [0.9, 1.0]", ["optim.betas", "1.0", "below 1"]),
        ("[optim]\nbetas = [0.9]", ["optim.betas", "a list of 1", "two numbers"]),
        ("[optim]\nwarmup = 1.0", ["optim.warmup", "1.0", "below 1"]),
        ("[optim]\nwarmup = -1", ["optim.warmup", "-1", "from 0"]),
        ("[parallel]\ntp = 0", ["parallel.tp", "found the integer 0", "from 1 to"]),
        ("[precision]\ndtype = 'fp16'", ["precision.dtype", "fp16", "float32"]),
        ("[checkpoint]\nexport_dtype = 'int8'", ["checkpoint.export_dtype", "int8", "\"auto\", \"float32\""]),
    ] {
        says(setup.with(text), &words);
    }
    says(setup.load("[data]\ntrain = ['a.jsonl']", &[]), &["run.toml: model.path", "missing", "[model]"]);
    says(setup.load("[model]\npath = 'm'\n[data]\ntrain = []", &[]), &["data.train", "at least one file"]);
    says(
        setup.load("[model]\npath = './x'\n[data]\ntrain = ['a.jsonl']", &[]),
        &["run.toml:2: model.path", "there is no folder", "owner/name"],
    );
    says(setup.load("[model\n", &[]), &["run.toml:1"]);
    says(setup.load("[model]\nx = 1\nx = 2\n", &[]), &["run.toml:3"]);
    assert!(Config::load(Path::new("no/such.toml"), &[]).unwrap_err().to_string().contains("no/such.toml"));
}

#[test]
fn values_that_contradict_each_other_are_refused() {
    let setup = Setup::new();
    for (text, words) in [
        ("[train]\nsteps = 5\nepochs = 1", ["run.toml:7: train.epochs", "train.steps"]),
        ("[train]\nglobal_batch = 6\nmicro_batch = 4", ["train.global_batch", "train.micro_batch = 4"]),
        ("[train]\nmicro_batch = 3", ["train.micro_batch", "8 sequences"]),
        ("[optim]\nlr = 1e-5\nmin_lr = 1e-4", ["optim.min_lr", "optim.lr"]),
        ("[train]\nsteps = 5\n[optim]\nwarmup = 5", ["optim.warmup", "5 (train.steps)"]),
        ("[train]\nsteps = 10\n[optim]\nschedule = 'wsd'\nwarmup = 5\ndecay = 6", ["optim.decay", "11 steps of 10"]),
        ("[optim]\nschedule = 'wsd'\nwarmup = 0.6\ndecay = 0.6", ["optim.decay", "Shorten"]),
        ("eval = ['b.jsonl']\neval_split = 0.1", ["data.eval_split", "data.eval"]),
        ("[train]\neval_every = 5", ["train.eval_every", "no evaluation data"]),
    ] {
        says(setup.with(text), &words);
    }
    let idle = setup.with("[optim]\ndecay = 0.2\nschedule = 'constant'\nmin_lr = 0.0").unwrap();
    assert_eq!(idle.notices.len(), 2, "{:?}", idle.notices);
}

#[test]
fn a_hub_id_is_what_has_no_folder() {
    let setup = Setup::new();
    let hub = setup.load("[model]\npath = 'Qwen/Qwen3-0.6B'\n[data]\ntrain = ['a.jsonl']", &[]).unwrap();
    assert!(hub.config.model.path_is_hub_id());
    assert!(reason(&hub, "model.path").unwrap().contains("Hub"));
    std::fs::create_dir_all(setup.path("Qwen/Qwen3-0.6B")).unwrap();
    let folder = setup.load("[model]\npath = 'Qwen/Qwen3-0.6B'\n[data]\ntrain = ['a.jsonl']", &[]).unwrap();
    assert!(!folder.config.model.path_is_hub_id());
    assert_eq!(Path::new(&folder.config.model.path), setup.path("Qwen/Qwen3-0.6B"));
}

#[test]
fn every_default_of_the_reference_is_accepted_as_written() {
    let setup = Setup::new();
    for key in Config::keys() {
        if key.section == "model" && key.name == "path" || !written_as_toml(&key.default) {
            continue;
        }
        let set = format!("{}={}", key.path(), key.default);
        let sets = if key.name == "train" { vec![] } else { vec![set.as_str()] };
        let a = setup.load(SMALLEST, &sets).unwrap().config;
        assert_eq!(a, setup.load(SMALLEST, &[]).unwrap().config, "{set}");
    }
}

fn written_as_toml(default: &str) -> bool {
    format!("x = {default}").parse::<toml::Table>().is_ok()
}

#[test]
fn shared_cases_are_read_as_they_are() {
    let Some(root) = shared("cases") else { return };
    let configs = files(&root, |name| name.ends_with(".toml"));
    assert!(configs.len() > 30);
    for path in configs {
        let resolved = Config::load(&path, &[]).unwrap_or_else(|e| panic!("{e}"));
        assert!(Path::new(&resolved.config.model.path).is_dir(), "{}", path.display());
    }
}

#[test]
fn shipped_examples_are_read() {
    for path in files(&PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples")), |name| name.ends_with(".toml")) {
        match Config::load(&path, &[]) {
            Ok(resolved) => assert_eq!(resolved.notices, Vec::<String>::new(), "{}", path.display()),
            // Some examples need data or a model that their comments say how to fetch; every key is read before paths are.
            Err(e) if e.to_string().contains("there is no fi") || e.to_string().contains("there is no fo") => {
                println!("SKIPPED in part: {e}")
            }
            Err(e) => panic!("{e}"),
        }
    }
}
