//! `docs/CONFIG.md` is what the declarations say.

#[test]
fn reference_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/CONFIG.md");
    let expected = temper_config::reference();
    if std::env::var_os("TEMPER_WRITE_DOCS").is_some() {
        std::fs::write(path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap();
    assert!(found == expected, "docs/CONFIG.md is out of date: TEMPER_WRITE_DOCS=1 cargo test -p temper-config reference");
}
