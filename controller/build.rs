//! Rebuilds when a migration changes: `sqlx::migrate!` reads the folder at compile time.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
