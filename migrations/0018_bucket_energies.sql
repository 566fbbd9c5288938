-- ‖g_b‖² of a rank's gradient before error feedback in each bucket: a JSON list, null in steps in which it was not taken.
ALTER TABLE steps ADD COLUMN bucket_energies TEXT;
