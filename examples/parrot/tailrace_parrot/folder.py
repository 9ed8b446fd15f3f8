from tailrace.serve.folders import AppFolder

FOLDER = AppFolder("parrot", "a parrot", "parrot.txt", "tailrace_parrot.app:load_folder")
