//! CRC-32C (Castagnoli), eight bytes at a time.

const POLYNOMIAL: u32 = 0x82f6_3b78;

const fn tables() -> [[u32; 256]; 8] {
    let mut t = [[0u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        t[0][byte] = crc;
        byte += 1;
    }
    let mut byte = 0;
    while byte < 256 {
        let mut step = 1;
        while step < 8 {
            let before = t[step - 1][byte];
            t[step][byte] = before >> 8 ^ t[0][(before & 0xff) as usize];
            step += 1;
        }
        byte += 1;
    }
    t
}

static TABLES: [[u32; 256]; 8] = tables();

/// Of several slices, one after the other.
pub(crate) fn crc32c(parts: &[&[u8]]) -> u32 {
    !parts.iter().fold(!0, |crc, part| update(crc, part))
}

fn update(mut crc: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    for w in words {
        let low = crc ^ u32::from_le_bytes([w[0], w[1], w[2], w[3]]);
        let pick = |table: usize, value: u32, byte: u32| TABLES[table][(value >> (8 * byte) & 0xff) as usize];
        crc = pick(7, low, 0) ^ pick(6, low, 1) ^ pick(5, low, 2) ^ pick(4, low, 3);
        crc ^=
            TABLES[3][w[4] as usize] ^ TABLES[2][w[5] as usize] ^ TABLES[1][w[6] as usize] ^ TABLES[0][w[7] as usize];
    }
    for byte in rest {
        crc = crc >> 8 ^ TABLES[0][((crc ^ u32::from(*byte)) & 0xff) as usize];
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value and the vectors of RFC 3720, B.4.
    #[test]
    fn known_values() {
        assert_eq!(crc32c(&[b"123456789"]), 0xe306_9283);
        assert_eq!(crc32c(&[&[0; 32]]), 0x8a91_36aa);
        assert_eq!(crc32c(&[&[0xff; 32]]), 0x62a8_ab43);
        let up: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&[&up]), 0x46dd_794e);
        assert_eq!(crc32c(&[&up[..5], &up[5..]]), 0x46dd_794e);
        assert_eq!(crc32c(&[]), 0);
    }
}
