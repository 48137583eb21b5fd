//! Models by Hub id, against a server of our own that answers as the Hub does.

mod common;

use common::*;
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{Arc, Mutex},
};
use temper_checkpoint::{WeightsFolder, hub::Hub, resolve_model};
use temper_tensor::DType;
use tempfile::{TempDir, tempdir};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const ID: &str = "some-org/tiny.model";

/// What the server has and how it misbehaves.
#[derive(Default)]
struct Shelf {
    files: BTreeMap<String, Vec<u8>>,
    /// Paths asked for, with the first byte of the range.
    asked: Vec<String>,
    /// The token that is needed.
    token: Option<String>,
    /// A status in place of the file.
    status: Option<(String, u16)>,
    /// Bodies of this file break off after so many bytes, so many times.
    cut: Option<(String, usize, usize)>,
    /// Bodies of this file are shorter than the server says elsewhere, and complete.
    short: Option<String>,
}

struct Server {
    endpoint: String,
    shelf: Arc<Mutex<Shelf>>,
}

impl Server {
    fn start(files: BTreeMap<String, Vec<u8>>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shelf = Arc::new(Mutex::new(Shelf { files, ..Shelf::default() }));
        let theirs = shelf.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let shelf = theirs.clone();
                std::thread::spawn(move || stream.map(|s| serve(s, &shelf)));
            }
        });
        Server { endpoint, shelf }
    }

    fn set(&self, f: impl FnOnce(&mut Shelf)) {
        f(&mut self.shelf.lock().unwrap());
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.shelf.lock().unwrap().asked)
    }
}

/// One request to a connection.
fn serve(mut stream: TcpStream, shelf: &Mutex<Shelf>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(path) = lines.next().and_then(|l| l.split(' ').nth(1).map(str::to_string)) else { return };
    let headers: BTreeMap<String, String> =
        lines.take_while(|l| !l.is_empty()).filter_map(|l| l.split_once(": ").map(|(k, v)| (k.to_lowercase(), v.to_string()))).collect();
    let (head, body) = answer(&path, &headers, &mut shelf.lock().unwrap());
    let _ = stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).and_then(|()| stream.write_all(&body));
}

fn answer(path: &str, headers: &BTreeMap<String, String>, shelf: &mut Shelf) -> (String, Vec<u8>) {
    let plain = |status: u16| (format!("HTTP/1.1 {status} No\r\nContent-Length: 0\r\n"), Vec::new());
    let range = headers.get("range").and_then(|r| r.strip_prefix("bytes=")).and_then(|r| r.split_once('-'));
    shelf.asked.push(format!("{path} {}", range.map_or("", |r| r.0)));
    if shelf.token.as_ref().is_some_and(|t| headers.get("authorization") != Some(&format!("Bearer {t}"))) {
        return plain(401);
    }
    if let Some((_, status)) = shelf.status.as_ref().filter(|(part, _)| path.contains(part)) {
        return plain(*status);
    }
    if [format!("/api/models/{ID}/revision/main"), format!("/api/models/{ID}/revision/{COMMIT}")].contains(&path.to_string()) {
        let siblings: Vec<_> = shelf.files.keys().map(|f| serde_json::json!({ "rfilename": f })).collect();
        let body = serde_json::json!({ "sha": COMMIT, "siblings": siblings }).to_string().into_bytes();
        return (format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n", body.len()), body);
    }
    let Some((name, data)) = path.strip_prefix(&format!("/{ID}/resolve/{COMMIT}/")).and_then(|n| Some((n, shelf.files.get(n)?))) else {
        return plain(404);
    };
    let Some((from, to)) = range.map(|(a, b)| (a.parse::<usize>().unwrap(), b.parse::<usize>().unwrap_or(data.len() - 1))) else {
        return plain(400);
    };
    if from >= data.len() {
        return plain(416);
    }
    let mut body = data[from..=to].to_vec();
    let (size, mut length) = (data.len(), body.len());
    if to > 0 {
        if let Some((_, bytes, times)) = shelf.cut.as_mut().filter(|c| c.0 == name && c.2 > 0) {
            body.truncate(*bytes);
            *times -= 1;
        }
        if shelf.short.as_deref() == Some(name) {
            body.truncate(size / 2);
            length = body.len();
        }
    }
    let head = format!(
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {length}\r\nContent-Range: bytes {from}-{to}/{size}\r\nETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n",
        blake3::hash(data).to_hex()
    );
    (head, body)
}

/// A sharded model with everything a repository has, wanted or not.
fn repository() -> BTreeMap<String, Vec<u8>> {
    let dir = tempdir().unwrap();
    let params = dense();
    write_sharded(dir.path(), &on_disk(&params, &values(&params, 1)), &["lm_head.weight"]);
    side_folder(dir.path());
    let mut files: BTreeMap<String, Vec<u8>> =
        snapshot(dir.path()).into_iter().map(|(p, b)| (p.to_string_lossy().into_owned(), b)).collect();
    for extra in [
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "onnx/model.onnx",
        "../evil.json",
        "additional_chat_templates/rag.jinja",
    ] {
        files.insert(extra.into(), b"x".to_vec());
    }
    files
}

fn hub(server: &Server, cache: &TempDir) -> Hub {
    Hub { endpoint: server.endpoint.clone(), cache: cache.path().join("hub"), token: None, offline: false }
}

fn assert_loads(dir: &Path) {
    let params = dense();
    let (tensors, _) = WeightsFolder::open(dir).unwrap().load(&params, DType::F32).unwrap();
    assert!(tensors.iter().zip(values(&params, 1)).all(|(t, d)| t.as_slice::<f32>().unwrap() == d));
}

#[test]
fn a_model_is_fetched_once_and_then_found() {
    let (server, cache) = (Server::start(repository()), tempdir().unwrap());
    let dir = hub(&server, &cache).model(ID, "main", true).unwrap();
    assert!(dir.ends_with(format!("models--some-org--tiny.model/snapshots/{COMMIT}")));
    assert_loads(&dir);
    let wanted = [
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "config.json",
        SHARD_1,
        SHARD_2,
        INDEX,
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&dir), wanted.map(String::from).into());
    assert_eq!(fs::read_to_string(dir.join("../../refs/main")).unwrap(), COMMIT);
    server.asked();
    // With the server: one question about the revision. Without, or offline, or by commit: none.
    assert_eq!(hub(&server, &cache).model(ID, "main", true).unwrap(), dir);
    assert_eq!(server.asked().len(), 1);
    assert_eq!(hub(&server, &cache).model(ID, COMMIT, true).unwrap(), dir);
    let offline = Hub { offline: true, ..hub(&server, &cache) };
    assert_eq!(offline.model(ID, "main", true).unwrap(), dir);
    assert_eq!(server.asked().len(), 0);
    let unreachable = Hub { endpoint: "http://127.0.0.1:1".into(), ..hub(&server, &cache) };
    assert_eq!(unreachable.model(ID, "main", true).unwrap(), dir);
}

#[test]
fn config_and_tokenizer_come_without_weights() {
    let (server, cache) = (Server::start(repository()), tempdir().unwrap());
    let dir = hub(&server, &cache).model(ID, "main", false).unwrap();
    assert!(dir.join("config.json").exists() && dir.join("tokenizer.json").exists() && !dir.join(INDEX).exists());
    let offline = Hub { offline: true, ..hub(&server, &cache) };
    assert_eq!(offline.model(ID, "main", false).unwrap(), dir);
    let error = offline.model(ID, "main", true).unwrap_err();
    assert!(error.is_bad_input() && error.to_string().contains("model.safetensors"), "{error}");
    assert_loads(&hub(&server, &cache).model(ID, "main", true).unwrap());
}

#[test]
fn offline_without_a_copy_says_so() {
    let (server, cache) = (Server::start(repository()), tempdir().unwrap());
    let error = Hub { offline: true, ..hub(&server, &cache) }.model(ID, "main", true).unwrap_err();
    assert!(error.is_bad_input());
    for word in [ID, "offline", "HF_HUB_OFFLINE", "main"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(server.asked().is_empty());
}

#[test]
fn refusals_name_the_model_the_server_and_the_remedy() {
    let (server, cache) = (Server::start(repository()), tempdir().unwrap());
    let get = |hub: Hub, id: &str, revision: &str| hub.model(id, revision, true).unwrap_err();
    let says = |error: temper_checkpoint::Error, bad: bool, words: &[&str]| {
        assert_eq!(error.is_bad_input(), bad, "{error}");
        for word in words.iter().chain(&[server.endpoint.as_str()]) {
            assert!(error.to_string().contains(word), "{word:?} is not in: {error}");
        }
    };
    says(get(hub(&server, &cache), "some-org/other", "main"), true, &["some-org/other", "no such model", "spelling"]);
    says(get(hub(&server, &cache), ID, "v9"), true, &["v9", "model.revision"]);
    says(get(hub(&server, &cache), ID, "../x"), true, &["revision"]);
    server.set(|s| s.token = Some("secret".into()));
    says(get(hub(&server, &cache), ID, "main"), true, &[ID, "HF_TOKEN"]);
    says(get(Hub { token: Some("wrong".into()), ..hub(&server, &cache) }, ID, "main"), true, &["token given", "gated"]);
    assert_loads(&Hub { token: Some("secret".into()), ..hub(&server, &cache) }.model(ID, "main", true).unwrap());

    let cache = tempdir().unwrap();
    server.set(|s| *s = Shelf { files: repository(), status: Some((SHARD_2.into(), 403)), ..Shelf::default() });
    says(get(hub(&server, &cache), ID, "main"), true, &[SHARD_2, "HF_TOKEN"]);
    server.set(|s| s.status = Some(("/api/".into(), 503)));
    says(get(hub(&server, &cache), ID, "main"), false, &["503", "later"]);
    server.set(|s| s.status = None);
    server.set(|s| drop(s.files.remove(INDEX)));
    says(get(hub(&server, &cache), ID, "main"), true, &["model.safetensors", "safetensors weights"]);
    let error = get(Hub { endpoint: "http://127.0.0.1:1".into(), ..hub(&server, &tempdir().unwrap()) }, ID, "main");
    assert!(!error.is_bad_input() && error.to_string().contains("127.0.0.1:1") && error.to_string().contains("HF_ENDPOINT"), "{error}");
}

#[test]
fn a_broken_download_goes_on_where_it_stopped() {
    let (server, cache) = (Server::start(repository()), tempdir().unwrap());
    server.set(|s| s.cut = Some((SHARD_1.into(), 100, 2)));
    assert_loads(&hub(&server, &cache).model(ID, "main", true).unwrap());
    let froms: Vec<String> = server.asked().iter().filter_map(|a| a.split_once(&format!("{SHARD_1} ")).map(|x| x.1.to_string())).collect();
    assert!(froms.contains(&"100".to_string()) && froms.contains(&"200".to_string()), "{froms:?}");

    let cache = tempdir().unwrap();
    server.set(|s| s.cut = Some((SHARD_1.into(), 10, 99)));
    let error = hub(&server, &cache).model(ID, "main", true).unwrap_err();
    assert!(!error.is_bad_input() && error.to_string().contains(SHARD_1), "{error}");
    assert!(!cache.path().join("hub/models--some-org--tiny.model/refs/main").exists(), "an unfinished download has no name");
    server.set(|s| s.cut = None);
    assert_loads(&hub(&server, &cache).model(ID, "main", true).unwrap());
}

#[test]
fn a_short_body_never_becomes_a_model() {
    let (server, cache) = (Server::start(repository()), tempdir().unwrap());
    server.set(|s| s.short = Some(SHARD_2.into()));
    let error = hub(&server, &cache).model(ID, "main", true).unwrap_err();
    assert!(error.to_string().contains(SHARD_2) && error.to_string().contains("bytes instead of"), "{error}");
    assert!(Hub { offline: true, ..hub(&server, &cache) }.model(ID, "main", true).is_err());
    server.set(|s| s.short = None);
    assert_loads(&hub(&server, &cache).model(ID, "main", true).unwrap());
}

#[test]
fn the_environment_is_read_as_other_programs_read_it() {
    let of = |vars: &[(&str, &str)]| Hub::from_vars(|k| vars.iter().find(|v| v.0 == k).map(|v| v.1.to_string()));
    let hub = of(&[("HOME", "/h")]);
    assert_eq!(
        (hub.endpoint.as_str(), hub.cache.as_path(), hub.offline),
        ("https://huggingface.co", Path::new("/h/.cache/huggingface/hub"), false)
    );
    assert_eq!(of(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).cache, Path::new("/x/huggingface/hub"));
    assert_eq!(of(&[("HOME", "/h"), ("HF_HOME", "/f")]).cache, Path::new("/f/hub"));
    assert_eq!(of(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]).cache, Path::new("/c"));
    assert_eq!(of(&[("HF_ENDPOINT", "https://mirror/")]).endpoint, "https://mirror");
    assert_eq!(of(&[("HF_ENDPOINT", "")]).endpoint, "https://huggingface.co");
    assert!(
        of(&[("HF_HUB_OFFLINE", "1")]).offline && of(&[("TRANSFORMERS_OFFLINE", "yes")]).offline && !of(&[("HF_HUB_OFFLINE", "0")]).offline
    );
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("token"), "stored\n").unwrap();
    let home = dir.path().to_str().unwrap();
    assert_eq!(of(&[("HF_HOME", home)]).token.as_deref(), Some("stored"));
    assert_eq!(of(&[("HF_HOME", home), ("HF_TOKEN", "given")]).token.as_deref(), Some("given"));
}

#[test]
fn a_folder_wins_over_an_id_and_typos_are_explained() {
    let dir = tempdir().unwrap();
    fs::create_dir_all(dir.path().join("some-org/tiny.model")).unwrap();
    assert_eq!(resolve_model(ID, dir.path(), "main", true).unwrap(), dir.path().join(ID));
    for spec in ["./missing", "missing", "a/b/c", "../x/y", "/abs/ent", "a b/c", "a/../b"] {
        let error = resolve_model(spec, dir.path(), "main", true).unwrap_err();
        assert!(error.is_bad_input() && error.to_string().contains("no such folder"), "{spec}: {error}");
    }
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(resolve_model("file", dir.path(), "main", true).unwrap_err().to_string().contains("is a file"));
}
