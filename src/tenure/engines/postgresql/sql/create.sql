BEGIN ISOLATION LEVEL READ COMMITTED;
-- No functions and operators that other accounts have created.
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = 0;
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('tenure'), hashtext(':schema'));
CREATE SCHEMA :schema;
--#parts
-- What note_loss notes. An upgrade replaces functions alone, while programs run.
CREATE TRIGGER truncates BEFORE TRUNCATE ON :schema.meta EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER truncated AFTER TRUNCATE ON :schema.meta EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER truncated AFTER TRUNCATE ON :schema.nodes EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER truncated AFTER TRUNCATE ON :schema.sessions EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER truncated AFTER TRUNCATE ON :schema.queues EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER truncated AFTER TRUNCATE ON :schema.requests EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER deleted AFTER DELETE ON :schema.meta
    FOR EACH ROW EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER deleted AFTER DELETE ON :schema.nodes
    FOR EACH ROW EXECUTE FUNCTION :schema.note_loss();
CREATE TRIGGER deleted AFTER DELETE ON :schema.queues
    FOR EACH ROW WHEN (OLD.owners + OLD.waiters > 0) EXECUTE FUNCTION :schema.note_loss();
INSERT INTO :schema.meta (version, serves, epoch, server, place)
    VALUES (:version, :serves, ':epoch', :schema.server_name(), ':schema.meta'::regclass);
INSERT INTO :schema.witness
    SELECT epoch, place, relaxed, quarantined_until FROM :schema.meta;
INSERT INTO :schema.nodes (path, config) VALUES (':node', ':config');
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA :schema FROM PUBLIC;
COMMIT;
