use super::*;

fn example() -> (Samples, SourceStats) {
    let mut samples = Samples::default();
    samples.push(1, &[5, 6, 7], &[TokenSpan { start: 1, end: 3, weight: 0.5 }]);
    samples.push(4, &[8], &[]);
    let mut stats =
        SourceStats { file: "a.jsonl".into(), rows: 3, format: Some("messages".into()), cached: true, ..SourceStats::default() };
    stats.add_bad(BadRow { file: "a.jsonl".into(), row: 2, column: Some(7), reason: "no role".into() });
    (samples, stats)
}

#[test]
fn what_is_stored_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("deep/x.tokens");
    assert_eq!(load(&place, Path::new("a.jsonl")), Ok(None));
    let (samples, stats) = example();
    store(&place, &samples, &stats).unwrap();
    assert_eq!(load(&place, Path::new("a.jsonl")), Ok(Some((samples, stats))));
    assert_eq!(fs::read_dir(place.parent().unwrap()).unwrap().count(), 1);
}

#[test]
fn damage_anywhere_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("x.tokens");
    let (samples, stats) = example();
    store(&place, &samples, &stats).unwrap();
    let good = fs::read(&place).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&place, &bad).unwrap();
        assert!(load(&place, Path::new("a")).is_err(), "byte {at}");
        fs::write(&place, &good[..at]).unwrap();
        assert!(load(&place, Path::new("a")).is_err(), "cut at {at}");
    }
    // A file that is whole but not ours.
    let mut foreign = b"something else".to_vec();
    foreign.extend_from_slice(blake3::hash(&foreign).as_bytes());
    fs::write(&place, foreign).unwrap();
    assert_eq!(load(&place, Path::new("a")), Err("it is of another kind".into()));
}

#[test]
fn the_place_follows_content_and_encoder() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a.jsonl", "b.jsonl", "a.json"].map(|n| folder.path().join(n));
    fs::write(&a, "x").unwrap();
    fs::write(&b, "x").unwrap();
    fs::write(&c, "x").unwrap();
    let key = |p: &Path, e: &[u8]| place(folder.path(), p, blake3::hash(e)).unwrap();
    assert_eq!(key(&a, b"1"), key(&b, b"1"));
    assert_ne!(key(&a, b"1"), key(&c, b"1"));
    assert_ne!(key(&a, b"1"), key(&a, b"2"));
    let before = key(&a, b"1");
    fs::write(&a, "y").unwrap();
    assert_ne!(key(&a, b"1"), before);
}
